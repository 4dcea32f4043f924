"""The bits of three kinds of float, as text and as a picture."""

from course_lib.show.float_bits import bit_text, float_bits


def test_the_picture_shows_the_bits_that_the_text_states():
    assert bit_text(1.0, "f32") == "0 01111111 " + 23 * "0"
    assert bit_text(-2.0, "bf16") == "1 10000000 0000000"
    assert bit_text(1.0, "f16") == "0 01111 0000000000"
    text = float_bits(-0.1).summary()
    for kind in ("f32", "bf16", "f16"):
        assert bit_text(-0.1, kind) in text
    assert "-0.10009765625" in text
