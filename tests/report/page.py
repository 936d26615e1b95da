"""A report as a test reads it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements of a page: tags, attributes by tag, text of the scripts, and cells of every table by its caption."""

    def __init__(self, text: str):
        super().__init__()
        self.attributes, self.open, self.scripts, self.tables, self.text = {}, [], [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes.setdefault(tag, []).append(dict(attrs))
        self.open.append(tag)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.tables[self.caption] = self.rows
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)
        elif "caption" in self.open:
            self.caption = data
        elif "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif "style" not in self.open:
            self.text += data
