"""The classes of ImageNet: readable names for a model with as many outputs."""

from collections import Counter

from timm.data import ImageNetInfo, infer_imagenet_subset


def _info(num_classes: int) -> ImageNetInfo | None:
    subset = infer_imagenet_subset({"num_classes": num_classes})
    return ImageNetInfo(subset) if subset else None


def imagenet_names(num_classes: int) -> list[str] | None:
    """A unique name for each class; None if no variant of ImageNet has this many classes."""
    info = _info(num_classes)
    if info is None:
        return None
    words = [info.index_to_description(index) for index in range(num_classes)]
    first = [text.split(", ")[0] for text in words]
    count = Counter(first)
    # some names occur twice (crane): use all the words, and the WordNet id if even those are the same
    names = [text if count[name] > 1 else name for name, text in zip(first, words, strict=True)]
    count = Counter(names)
    ids = info.label_names()
    return [f"{name} ({ids[index]})" if count[name] > 1 else name for index, name in enumerate(names)]


def imagenet_aliases(num_classes: int) -> list[tuple[str, ...]] | None:
    """Other names of each class: its WordNet id, and those of its words that no other class has."""
    info = _info(num_classes)
    if info is None:
        return None
    words = [info.index_to_description(index).split(", ") for index in range(num_classes)]
    count = Counter(word for each in words for word in each)
    ids = info.label_names()
    return [(ids[index], *(word for word in each if count[word] == 1)) for index, each in enumerate(words)]
