#!/bin/sh
# hgrn_deit_tiny against timm's deit_tiny_patch16_224 on the packaged digits: the same image and patch size, steps and
# recipe. A few minutes on two cores; arguments are passed on, for example --seed 1.
set -e
cd "$(dirname "$0")/.."
for model in hgrn_deit_tiny deit_tiny_patch16_224; do
    python train_imagenet.py --model "$model" --output "runs/compare-$model" "$@"
done
for model in hgrn_deit_tiny deit_tiny_patch16_224; do
    printf '%-24s top-1 after the last epoch: %s\n' "$model" "$(tail -n 1 "runs/compare-$model/log.csv" | cut -d , -f 6)"
done
