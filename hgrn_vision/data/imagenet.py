"""The classes of ImageNet: readable names for a model whose head has its number of outputs."""

from collections import Counter

from timm.data import ImageNetInfo, infer_imagenet_subset


def _info(num_classes: int) -> ImageNetInfo | None:
    subset = infer_imagenet_subset({"num_classes": num_classes})
    return ImageNetInfo(subset) if subset else None


def imagenet_names(num_classes: int) -> list[str] | None:
    """A name for each class, no two alike; None where ImageNet has no such number of classes."""
    info = _info(num_classes)
    if info is None:
        return None
    words = [info.index_to_description(index) for index in range(num_classes)]
    first = [text.split(", ")[0] for text in words]
    count = Counter(first)
    # some names occur twice (crane): use all the words, and where even those agree the WordNet id
    names = [text if count[name] > 1 else name for name, text in zip(first, words, strict=True)]
    count = Counter(names)
    ids = info.label_names()
    return [f"{name} ({ids[index]})" if count[name] > 1 else name for index, name in enumerate(names)]


def imagenet_aliases(num_classes: int) -> list[tuple[str, ...]] | None:
    """What else each class may be called: its WordNet id, and its words where no other class has them."""
    info = _info(num_classes)
    if info is None:
        return None
    words = [info.index_to_description(index).split(", ") for index in range(num_classes)]
    count = Counter(word for each in words for word in each)
    ids = info.label_names()
    return [(ids[index], *(word for word in each if count[word] == 1)) for index, each in enumerate(words)]
