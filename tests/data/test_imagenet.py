"""Names of ImageNet's classes."""

from hgrn_vision.data.imagenet import imagenet_aliases, imagenet_names


def test_a_thousand_names_no_two_alike():
    names = imagenet_names(1000)
    assert len(set(names)) == 1000
    assert names[0] == "tench" and names[281] == "tabby"
    cranes = [name for name in names if name.startswith("crane")]
    assert len(cranes) == 2


def test_aliases_name_one_class_each():
    aliases = imagenet_aliases(1000)
    assert "n01440764" in aliases[0] and "Tinca tinca" in aliases[0]
    every = [alias for names in aliases for alias in names]
    assert len(set(every)) == len(every)


def test_other_numbers_of_classes_are_not_imagenet():
    assert imagenet_names(10) is None and imagenet_aliases(10) is None


def test_a_name_that_occurs_twice_is_written_out():
    names = imagenet_names(1000)
    assert (names[638], names[639], names[134]) == ("maillot", "maillot, tank suit", "crane (n02012849)")
