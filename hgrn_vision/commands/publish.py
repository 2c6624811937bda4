"""`hgrn-vision publish`: write a trained model as a Hub repository, which others can load with timm."""

import argparse
from pathlib import Path

import yaml

from ..files import whole_folder, write_text
from ..inference.pretrained import LoadedModel, load_model
from ..train.run_folder import write_model
from ._console import printable
from ._flags import MODEL_HELP

EXAMPLE = "hgrn-vision publish runs/flowers flowers-hgrn --license cc-by-4.0"
HGRN = """\
The architecture is in the Python package `hgrn_vision`:
it uses a gated linear recurrence instead of attention ([arXiv 2311.04823](https://arxiv.org/abs/2311.04823))."""
CARD = """\
# Model card for {title}

{architecture} for {classes:,} classes, {parameters:.1f}M parameters. {origin}

- **Image size:** {side}
- **Training images:** not recorded here

```python
{imports}

model = timm.create_model("hf-hub:USER/{title}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
probabilities = model(transform(Image.open("photo.jpg").convert("RGB"))[None]).softmax(-1)
name = model.pretrained_cfg["label_names"][probabilities.argmax()]
```

On the command line: `hgrn-vision predict hf-hub:USER/{title} photo.jpg`.

<details>
<summary>The {classes:,} classes</summary>

{names}

</details>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("model", metavar="RUN", help=MODEL_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
    parser.add_argument(
        "--license", default="unknown", metavar="ID", help="license of the weights, as the Hub spells it [unknown]"
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder; it appears only once it is complete."""
    folder = Path(args.folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{args.folder} is {'not empty' if folder.is_dir() else 'a file'}; give a new or empty folder")
    loaded = load_model(args.model, "cpu")
    with whole_folder(folder) as unfinished:
        write_repository(unfinished, loaded, folder.name, args.license)
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {args.folder}")
    print(f"read it:  timm.create_model('local-dir:{args.folder}', pretrained=True)")
    print(f"share it: hf upload USER/{folder.name} {args.folder} (fill in README.md first)")
    return 0


def write_repository(folder: Path, loaded: LoadedModel, title: str, license: str) -> None:
    """Write config.json, model.safetensors and README.md."""
    # drop the tag of the architecture's default weights and the second list of class names
    described = {key: value for key, value in loaded.model.pretrained_cfg.items() if key not in ("tag", "label_names")}
    loaded.model.pretrained_cfg = {**described, "license": license}
    write_model(folder, loaded.model, loaded.model_args, loaded.class_names)
    write_text(folder / "README.md", model_card(loaded, title, license))


def model_card(loaded: LoadedModel, title: str, license: str) -> str:
    """The text of README.md: timm's front matter, how to load the model, its classes."""
    front = {
        "tags": ["image-classification", "timm"],
        "pipeline_tag": "image-classification",
        "library_name": "timm",
        "license": license,
    }
    imports, origin = ["import timm", "from PIL import Image"], "The architecture is one of timm's."
    if hasattr(loaded.model, "recurrences"):
        imports, origin = ["import hgrn_vision  # registers the architecture with timm", *imports], HGRN
    text = CARD.format(
        title=title,
        architecture=f"`{loaded.model.pretrained_cfg['architecture']}`",
        classes=len(loaded.class_names),
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()) / 1e6,
        side=" x ".join(map(str, loaded.spec.input_size[1:])),
        origin=origin,
        imports="\n".join(imports),
        # indented as code, so that no name is read as markup
        names="\n".join(f"    {printable(name)}" for name in loaded.class_names),
    )
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n{text}"
