"""Train HGRN vision models: on ImageNet-1k with the paper's recipe, on your own images, or on digits to see it work.

    python train_imagenet.py
        no data given: the packaged handwritten digits, above 97 top-1 in three minutes on two CPU cores

    torchrun --nproc-per-node 8 train_imagenet.py /data/imagenet --recipe paper --model hgrn_deit_tiny
        ImageNet-1k: 74.40 top-1, and 80.09 with hgrn_deit_small (arXiv 2311.04823, table 7)

The same command again continues a run that was interrupted. --help lists the settings, --smoke tries everything in a
few steps, --eval RUN evaluates.
"""

import sys

from hgrn_vision.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
