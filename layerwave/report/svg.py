"""A figure as SVG that stands inside an HTML page."""

from io import StringIO
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure


def inline_svg(figure: Figure, name: str, alt: str) -> Markup:
    """The figure as one `<svg>` element without references outside itself, the same for the same figure.

    Black becomes the colour of the page's text and white areas become transparent, so that it reads on a light and on
    a dark page. Type is drawn as paths: it needs no font.

    Args:
        name: unique in the page; every id inside starts with it.
        alt: what the figure shows, for those who cannot see it.
    """
    text = StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for element in root.iter():
        for child in [child for child in element if child.tag.endswith(("}metadata", "}style"))]:
            element.remove(child)
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _value(_local(key), value, name) for key, value in element.attrib.items()}
    root.attrib = {
        "viewBox": root.get("viewBox"),
        "role": "img",
        "aria-label": alt,
        "fill": "currentColor",
        "stroke-linejoin": "round",
    }
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _local(qualified: str) -> str:
    """A name without its XML namespace: HTML knows what an `<svg>` holds."""
    return qualified.rpartition("}")[2]


def _value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    return value.replace("url(#", f"url(#{name}-").replace("#000000", "currentColor")
