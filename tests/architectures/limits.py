"""How long the prompts are, and how far off a right state may be."""

BLOCK, CHUNK = 128, 256
"""Slots of the engine's block on a CPU, and the most tokens of one step."""
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 45)
SHARED = BLOCK + 32
"""Tokens that two more prompts share; then they go on."""
TAILS = (1, 50)

FLOAT32_TOLERANCE = 5e-4
"""Relative, of the worst token. A right capture is some 1e-6 off, 1e-4 where experts and norms behind them
amplify it; a wrong layer, row or norm some 1e-1."""
MEDIAN_FACTOR, MEDIAN_SLACK = 1.5, 1e-3
"""Other dtypes are held by their median, against transformers' own: a router may flip on single tokens."""
