#!/bin/sh
# The demo model's GGUF file, from the Hugging Face folder that train_demo.py writes, by the commands that any
# other model takes too (docs/bring-your-own-model.md explains them):
#
#     python scripts/train_demo.py --out powerinfer-demo
#     sh scripts/make_demo.sh powerinfer-demo work
#
# Needs powerinfer[plot,train], sentencepiece, and for the reference logits gguf and transformers. Everything is written
# to the folder `work`; the last lines say where it belongs. Training the predictors took 6 minutes on a machine
# with an H200, and all else 5 minutes on two CPU cores. Training that was broken off goes on with the layer
# where it stopped.
set -eu
folder=$1
work=$2
scripts=$(dirname "$0")
mkdir -p "$work"

# The text: one file to learn from, and one to measure on.
python "$scripts/demo_corpus.py" --out "$work"

# The folder becomes a GGUF file, and the file answers as the folder does.
powerinfer convert "$folder" -o "$work/dense.gguf" --check

# How often each neuron fires.
powerinfer profile "$work/dense.gguf" --text "$work/training.txt" --special --tokens 200000 \
    -o "$work/profiled.gguf" --json > "$work/profile.json"

# Predictors of which neurons will.
powerinfer predictor train "$work/profiled.gguf" --text "$work/training.txt" --special \
    --tokens 196608 --held-out 16384 --steps 4000 --spool-gib 16 --work-dir "$work/predictors" \
    -o "$work/sparse.gguf"

# Four bits a weight. That moves the predictors' scores a little, so their thresholds are set anew.
powerinfer quantize "$work/sparse.gguf" "$work/quantised.gguf" Q4_0 --token-embedding-type Q8_0
powerinfer predictor calibrate "$work/quantised.gguf" --text "$work/training.txt" --special \
    --tokens 32768 -o "$work/demo.gguf"

# What it costs, on text that nothing was trained with.
powerinfer predictor check "$work/demo.gguf" --text "$work/held-out.txt" --special --chunks 0 --sweep \
    --report "$work/demo-predictor.md" --plot "$work/demo-predictor.png" --json > "$work/check.json"
powerinfer perplexity "$work/demo.gguf" --text "$work/held-out.txt" --special \
    --sparsity dense,exact,predicted --json > "$work/perplexity.json"

# The card, and reference logits for the tests.
python "$scripts/demo_card.py" "$folder" "$work"
python "$scripts/demo_golden.py" --tokenizer "$folder/tokenizer.model" --model "$work/demo.gguf" \
    --out "$work/demo.npz"

echo "
$work/demo.gguf and README.md belong in powerinfer/demo, demo-predictor.md and .png in docs,
demo.npz in tests/golden."
