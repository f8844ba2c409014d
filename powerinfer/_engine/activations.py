"""Names of activations, apart from types.py: what only parses a command line need not wait for numpy."""

SILENT = ("relu", "drelu", "relu2")
"""Those that leave neurons silent."""
ACTIVATIONS = (*SILENT, "silu", "gelu", "gelu_tanh")
"""Those that may be said of any model; the others belong to architectures."""
