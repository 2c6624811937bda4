import base64
import io

import pytest
from PIL import Image

from hgrn_vision.report.gallery import SIDE, thumbnail


@pytest.mark.parametrize(
    "size, shown",
    [((40 * SIDE, 10 * SIDE), (2 * SIDE, SIDE // 2)), ((SIDE, 4 * SIDE), (SIDE // 4, SIDE)), ((20, 10), (20, 10))],
)
def test_thumbnails_fit_their_place_and_carry_themselves(size, shown):
    image = Image.new("RGB", size, (200, 30, 40))
    kind, content = thumbnail(image).split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as small:
        assert small.size == shown
    assert image.size == size, "what was given stays as it is"
