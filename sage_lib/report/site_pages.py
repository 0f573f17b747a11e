"""Pages of the site that are read from what there is: figures, reported tables, equations. Markdown
with HTML where a table is wide."""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from sage_lib import paths
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.files import read_json
from sage_lib.report import equations, paper_items, report_items, reported

#: Reported table -> the table of a profile's measured results that holds the same measure of the
#: same methods, on the profile's own task and model. The others were measured nowhere here.
COUNTERPARTS = {
    "sage_table1": "table1.csv",
    "sage_table2": "table2.csv",
    "sage_table3": "table1.csv",
    "sage_table5": "table5.csv",
    "sage_table9": "ood.csv",
    "report_table4": "votes.csv",
}
SOURCES = {"sage": "SAGE", "report": "Exploration report"}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """An HTML table that scrolls by itself; cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="wide {kind}"><table><thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def fidelity() -> str:
    """Setting by setting: the paper, the authors' code, this companion, and why."""
    frame = reported.fidelity()
    rows = [[html.escape(cell) for cell in row] for row in frame.itertuples(index=False)]
    words = "\n".join(
        f"| {word} | {(frame['why'].str.split(':').str[0] == word).sum()} |"
        for word in reported.FOLLOWED
    )
    return f"""\
# Fidelity

{len(frame)} settings: what the paper says and where, what the authors' code does (file and line),
what the profile `paper` does, and why. `why` begins with whom it follows: both, the paper, the code
or neither; *restored* is a formula that the paper's text copy lost, *chosen* stands where neither
says anything. From `data/reported/fidelity.csv`, whose README says at which commit the code was
read.

| followed | settings |
|---|---|
{words}

{_table(reported.FIDELITY_COLUMNS, rows, "settings")}
"""


def measured_rows(table: str, profiles: Iterable[Profile]) -> dict[str, list[str]]:
    """Profile -> the rows of a reported table that its published results hold, too."""
    found: dict[str, list[str]] = {}
    if table not in COUNTERPARTS:
        return found
    rows = dict.fromkeys(reported.load(table)["row"])
    for profile in profiles:
        path = paths.measured(profile.name, published=True) / COUNTERPARTS[table]
        if not path.is_file():
            continue
        labels = {profile.label(key) for key in pd.read_csv(path)["method"]}
        both = [row for row in rows if row.rpartition(" / ")[2] in labels]
        if set(both) - {profile.label(BASE)}:  # a base alone is no comparison of methods
            found[profile.name] = both
    return found


def _as_printed(table: str) -> str:
    """A reported table as printed: a line for each row, a column for each data set and metric."""
    reported.load(table)  # checked
    frame = pd.read_csv(paths.REPORTED / f"{table}.csv", dtype=str, keep_default_na=False)
    spread = frame["std"].map(lambda std: f" ± {std}" if std else "")
    frame["cell"] = frame["mean"] + spread
    frame["column"] = [
        "<br>".join(html.escape(part) for part in pair)
        for pair in zip(frame["dataset"], frame["metric"], strict=True)
    ]
    columns = list(dict.fromkeys(frame["column"]))
    wide = frame.pivot(index="row", columns="column", values="cell").fillna("")
    rows = [
        [f"<b>{html.escape(row)}</b>", *wide.loc[row, columns]]
        for row in dict.fromkeys(frame["row"])
    ]
    return _table(["", *columns], rows, "numbers")


def title(table: str) -> str:
    """sage_table1 -> SAGE, Table 1."""
    source, _, number = table.partition("_table")
    return f"{SOURCES[source]}, Table {number}"


#: Of each source its items, and what their page calls them.
ITEMS = {"sage": paper_items.ITEMS, "report": report_items.ITEMS}


def _item_of(table: str) -> report_items.Item:
    source, _, number = table.partition("_table")
    [item] = [one for one in ITEMS[source] if one.item == f"Table {number}"]
    return item


def _items(source: str, evidence: Profile, names: Mapping[str, str]) -> str:
    """Every figure and table of a source with its state, as a table in HTML."""
    printed = {
        _item_of(table).item: title(table)
        for table in reported.tables()
        if table.startswith(source)
    }
    rows = []
    for one in ITEMS[source]:
        name = html.escape(one.item)
        if one.item in printed:
            name = f'<a href="#{_anchor(printed[one.item])}">{name}</a>'
        made = ", ".join(
            f'<a href="notebooks/{names[number]}.html">{number}</a>' for number, _ in one.made
        )
        words = [html.escape(word) for word in (one.shows, one.state_of(evidence), one.why)]
        rows.append([name, words[0], words[1], made, words[2]])
    return _table(["item", "what it shows", "state", "notebooks", "why"], rows, "items")


def reported_tables(
    profiles: Sequence[Profile], evidence: Profile, names: Mapping[str, str]
) -> str:
    """Every figure and table of the two papers with its state, then the tables as printed.

    ``evidence``: the profile whose results decide the states; ``names``: number of a notebook ->
    its name.
    """
    parts = []
    for table in sorted(reported.tables(), key=lambda name: (name.startswith("report"), name)):
        item = _item_of(table)
        lines = [
            f"- profile `{name}`: {', '.join(methods)} "
            f"(`data/published/{name}/{COUNTERPARTS[table]}`)"
            for name, rows in measured_rows(table, profiles).items()
            # of "Qwen2.5-7B / GRPO" the method alone: the model is the profile's own
            for methods in [dict.fromkeys(row.rpartition(" / ")[2] for row in rows)]
        ]
        state = f"**{item.state_of(evidence)}**" + (f": {item.why}" if item.why else "")
        said = (
            ["Methods of the same names, measured with the profile's own model:", "", *lines]
            if lines
            else []
        )
        parts.append("\n".join([f"## {title(table)}\n\n{state}\n", *said, ""]))
        parts.append(f"{_as_printed(table)}\n")
    return f"""\
# What the papers report

Every figure and table of the two papers: measured here, in part, or reported only, and why.
*Measured here* means that a run of this companion took the same measure **on its own task and
model** (profile `{evidence.name}`): the numbers answer the same question and are no repetition of
the paper's. They are in the notebooks. Below, the tables as printed, copied by hand
(`data/reported`), decimals as printed; figures are not copied.

## SAGE, item by item

{_items("sage", evidence, names)}

## Exploration report, item by item

{_items("report", evidence, names)}

""" + "\n".join(parts)


def _anchor(heading: str) -> str:
    """What MyST calls a heading in links."""
    return heading.lower().replace(",", "").replace(" ", "-")


def equation_map(link: str = "api/{module}/index.html#{anchor}") -> str:
    """Equation -> function -> tests, with links into the API's pages."""
    parts = []
    for equation, places in equations.equation_map().items():
        rows = []
        for place in places:
            shown = html.escape(place.qualified.removeprefix("sage_lib."))
            private = any(part.startswith("_") for part in place.name.split("."))
            if private:
                name = f"<code>{shown}</code>"
            else:
                href = link.format(
                    module=place.module.replace(".", "/"),
                    anchor=place.qualified if place.name else f"module-{place.module}",
                )
                name = f'<a href="{href}"><code>{shown}</code></a>'
            tests = "<br>".join(f"<code>{html.escape(test)}</code>" for test in place.tests[:3])
            if len(place.tests) > 3:
                tests += f"<br>and {len(place.tests) - 3} more"
            rows.append([name, tests])
        heading = f"{equation.paper}, eq. {equation.number}"
        parts.append(
            f"## {heading}\n\n{_table(['in the code', 'tests that use it'], rows, 'places')}\n"
        )
    return """\
# From equation to code

Read from the docstrings: each equation that one names, and the tests that use the function by its
name. A function may name an equation that it implements, checks, or draws.

""" + "\n".join(parts)


def gallery(drawn_by: Mapping[str, str], about: Mapping[str, str]) -> str:
    """A thumbnail of every published figure, by folder, with what draws it again.

    ``drawn_by``: "folder/name" -> name of the notebook; ``about``: notebook -> its line. Pictures
    are expected in _static/figures and _static/thumbnails.
    """
    parts = []
    for folder in sorted(path for path in paths.FIGURES.iterdir() if path.is_dir()):
        cards = [
            _card(record, drawn_by.get(f"{folder.name}/{record.stem}", ""), about)
            for record in sorted(folder.glob("*.json"))
        ]
        grid = "\n".join(cards)
        parts.append(f'## {folder.name}\n\n<div class="gallery">\n{grid}\n</div>\n')
    return """\
# Gallery

Every published figure, drawn from `data/published` (those of `theory` from nothing but their
formulas). `make figures` draws all of them again; below each stands its notebook, and the command
that makes it from runs of your own.

""" + "\n".join(parts)


def _card(record: Path, notebook: str, about: Mapping[str, str]) -> str:
    known = read_json(record)
    place = f"{record.parent.name}/{record.stem}"
    words = str(known.get("alt") or f"{record.stem.replace('_', ' ')} ({record.parent.name})")
    alt = html.escape(words)
    again = "make figures"
    source = ""
    if notebook:
        number = notebook[:2]
        profile = "" if record.parent.name == "theory" else f" --profile {record.parent.name}"
        again = f"sage-companion reproduce{profile} --only {number}"
        story = html.escape(about.get(notebook, ""))
        source = f'<a href="notebooks/{notebook}.html" title="{story}">notebook {number}</a>, '
    return f"""\
<figure><a class="picture" href="_static/figures/{place}.png">\
<img loading="lazy" src="_static/thumbnails/{place}.png" alt="{alt}"></a>
<figcaption><b>{html.escape(record.stem)}</b><br>{source}drawn at \
<code>{html.escape(str(known["revision"]))}</code><br><code>{again}</code></figcaption></figure>"""
