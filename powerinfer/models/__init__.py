"""Models as files: converting, quantizing, profiling, predictors, perplexity, plans."""
