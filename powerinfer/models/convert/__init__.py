"""From published checkpoints to the files that the engine reads."""
