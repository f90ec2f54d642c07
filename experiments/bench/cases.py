"""The shapes that benchmarks, tuning and GPU tests share: one table."""

Gemm = tuple[int, int, int]

# (M, N, K) of the product alone. MOSS, Table 6.
MOSS: list[Gemm] = [
    (2048, 7168, 11008),
    (5120, 5120, 10240),
    (2048, 7168, 4096),
    (4096, 2048, 7168),
    (4096, 4096, 8192),
    (4096, 4096, 12288),
    (8192, 8192, 8192),
]
# Of MOSS and DeepGEMM's own table, then Llama-7B's with 16 k tokens, then the rest of MOSS.
GEMMS: list[Gemm] = [
    (8192, 8192, 8192),
    (2048, 7168, 4096),
    (16384, 4096, 4096),
    (4096, 7168, 16384),
    (4096, 4096, 8192),
    (4096, 2048, 7168),
    (4096, 24576, 1536),
    (4096, 4096, 12288),
    (16384, 22016, 4096),
    (16384, 4096, 11008),
    *MOSS[:2],
]

# (inputs, outputs) of the linear layers: Llama-2's 7B and 13B.
LINEARS_7B = [(4096, 4096), (4096, 11008), (11008, 4096)]
LINEARS_13B = [(5120, 5120), (5120, 13824), (13824, 5120)]
TOKENS = (8192, 16384)

# (rows, columns) of matrices that are quantized: activations and weights of Llama-7B.
MATRICES = [(16384, 4096), (16384, 11008), (4096, 11008)]
