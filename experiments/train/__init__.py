"""Trains a Llama on text, once per recipe, and compares the recipes.

    python -m experiments.train --recipe bf16 coat_optimizer --data 'corpus/*.txt' --run NAME

The files of a run are in OUT/NAME: config.json, log.txt, tokenizer.json (byte-pair encoding), loss.png, and a folder
for each recipe with metrics.jsonl, tensorboard/, checkpoints/ and result.json. The same command resumes a run.

Exit codes: 0 done; 1 loss or gradient not finite; 2 wrong input, or an unusable file of the run; 3 a file cannot be
written, or out of device memory; 4 another process trains this run; 5 another process of this run has ended or did not
join; 130 and 143 stopped by SIGINT or SIGTERM.
"""
