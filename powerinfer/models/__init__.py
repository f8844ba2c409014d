"""Models as files: converting, quantizing, profiling, predictors, plans, benchmarks, the hub."""
