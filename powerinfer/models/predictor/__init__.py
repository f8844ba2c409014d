"""Predictors of active neurons: made by training or from the weights alone, calibrated, and checked.

data       what the feed-forward of a model reads and makes, over a text
curve      what a threshold costs and keeps
train      a two-layer perceptron for one layer
size       how large that must be: the adaptive search of the PowerInfer paper, section 5.1
svd        a predictor from the weights alone, by singular values
calibrate  thresholds of each layer
build      all layers, within a budget; a run that was broken off goes on where it was
output     a PowerInfer file, or a folder as the original publishes them
check      what a predictor does to a model, by the engine's own counters
"""
