"""Trains a Llama on text, once per recipe, and compares the recipes.

    python -m experiments.train --recipe bf16 coat_optimizer --data 'corpus/*.txt' --run NAME

Everything of a run lies in OUT/NAME: config.json, log.txt, tokenizer.json (byte-pair encoding), loss.png, and for every
recipe a folder with metrics.jsonl, tensorboard/, checkpoints/ and result.json. The same command goes on where the last
one ended.

Exit codes: 0 done; 1 loss or gradient not finite; 2 wrong input, or a file of the run that cannot be used; 3 a file
cannot be written, or the device's memory is too small; 4 another process trains this run; 5 another of several
processes has ended, or never came; 130 and 143 stopped by SIGINT or SIGTERM.
"""
