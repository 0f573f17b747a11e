"""Stored outputs of notebooks: what is taken away, what would be noticed, and what may differ."""

import base64
import io
import json

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from nbformat import v4
from PIL import Image
from test_stages import notebook
from traitlets.config import Config, PyFileConfigLoader

from sage_lib import files, paths
from sage_lib.pipeline import cli, notebooks, outputs
from sage_lib.report import style

TABLE = '<style>#T_1a2b3_row0 {}</style><table id="T_1a2b3"><tr><td>0.5</td></tr></table>'


def picture(size):
    """A PNG of noise in base64, which nothing makes small."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    drawn = io.BytesIO()
    Image.fromarray(pixels).save(drawn, "png")
    return base64.b64encode(drawn.getvalue()).decode()


PNG = picture(8)


def shown(**data):
    return v4.new_output(
        "display_data", data={kind.replace("_", "/"): text for kind, text in data.items()}
    )


def stream(text, name="stdout"):
    return v4.new_output("stream", text=text, name=name)


def stored(*of_cell):
    """A notebook of one code cell, with what is kept of these outputs of its executed copy."""
    cell = v4.new_code_cell("show()", id="a")
    own = {"metadata": {"execution": {"x": "1"}}, "outputs": list(of_cell)}
    done = v4.new_code_cell("show()", id="a", **own)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    executed = v4.new_notebook(cells=[done], metadata={**kernel, "papermill": {"duration": 3}})
    return outputs.with_outputs(v4.new_notebook(cells=[cell], metadata=kernel), executed)


def test_what_a_run_leaves_of_itself_is_taken_away():
    notebook = stored(
        stream("10%|##", "stderr"),
        stream("at "),
        stream(f"{paths.ROOT}/data, "),
        shown(image_png=PNG, text_plain="<Figure size 640x480 with 1 Axes>"),
        v4.new_output("display_data", data={outputs.WIDGET: {"model_id": "1"}, "text/plain": "V"}),
        shown(text_html=TABLE, text_plain="<Styler at 0x7f0000000000>"),
    )
    [cell] = notebook.cells
    assert [dict(output.get("data", {})) for output in cell.outputs] == [
        {},
        {"image/png": outputs.smaller(PNG)},
        {"text/html": TABLE.replace("T_1a2b3", "T_a-2-0")},
    ]
    assert cell.outputs[0].text == "at data, " and cell.execution_count == 1
    assert cell.metadata == {} and "papermill" not in notebook.metadata
    assert outputs.faults(notebook) == []


def test_what_a_picture_says_in_words_is_kept():
    picture = shown(image_png=PNG, text_plain="<Figure size 640x480 with 1 Axes>")
    picture.metadata = {"image/png": {"alt": "pass@k by k", "width": 3}, "ran": "2026"}
    notebook = stored(picture)
    assert notebook.cells[0].outputs[0].metadata == {"image/png": {"alt": "pass@k by k"}}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (stream("see /home/me/x"), "a path of a machine"),
        (shown(text_plain="<object at 0x7f12345678>"), "address"),
        (stream("<Figure size 640x480>"), "a picture instead"),
        (stream(" 40%|####  | 2/5"), "a progress bar"),
        (shown(image_png=picture(99)), "picture of over"),
    ],
)
def test_what_is_not_the_same_elsewhere_is_a_fault(output, words, monkeypatch):
    monkeypatch.setattr(outputs, "LARGEST_PICTURE", 5_000)  # noise that large takes seconds to pack
    [fault] = outputs.faults(stored(output))
    assert words in fault


def test_a_web_address_and_a_fraction_are_no_path():
    text = "https://example.org/home/a and data/home/b, 1/work/2"
    assert outputs.faults(stored(stream(text))) == []


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("pass@1 0.310", "pass@1 0.311", True),  # one unit of the last digit
        ("pass@1 0.310", "pass@1 0.312", False),
        ("3 of 7", "4 of 7", False),  # counts are equal
        ("holds to 4e-16", "holds to 9e-17", True),  # both nothing but rounding
        ("1.2e-03", "1.3e-03", True),
        ("1.2e-03", "1.2e-02", False),
        ("1,500 agree", "1,500 differ", False),
        ("-0.000", "0.000", True),
    ],
)
def test_text_agrees_up_to_the_last_digit_that_is_printed(old, new, same):
    assert outputs.agree(old, new) is same


def test_a_changed_cell_of_a_table_a_lost_picture_and_a_new_line_are_noticed():
    one = stored(shown(text_html=TABLE), shown(image_png=PNG), stream("a"))
    for other in (
        stored(shown(text_html=TABLE.replace("0.5", "0.7")), shown(image_png=PNG), stream("a")),
        stored(shown(text_html=TABLE), stream("a")),
        stored(shown(text_html=TABLE), shown(image_png=PNG), stream("a\nb")),
    ):
        assert len(outputs.differences(one, other)) == 1
    styled = TABLE.replace("row0", "row1")
    same = stored(shown(text_html=styled), shown(image_png=picture(9)), stream("a"))
    assert outputs.differences(one, same) == []


def test_a_notebook_is_executed_stored_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    path = notebook(tmp_path, "99_trial", "print(x)", parameters="x = 0.5")
    with pytest.raises(SystemExit):
        cli.main(["notebooks", "--check"])
    assert "99_trial: cell 1: stored '', now '0.5'" in capsys.readouterr().out
    cli.main(["notebooks"])
    assert nbformat.read(path, as_version=4).cells[1].outputs[0].text == "0.5\n"
    before = path.read_bytes()
    cli.main(["notebooks", "--check"])
    cli.main(["notebooks", "--only", "99"])
    assert path.read_bytes() == before
    path.write_text(path.read_text().replace("0.5\\n", "0.7\\n"))
    with pytest.raises(SystemExit):
        cli.main(["notebooks", "--check"])
    assert "stored '0.7', now '0.5'" in capsys.readouterr().out


every = pytest.mark.parametrize(
    "path", [one.path for one in notebooks.select()], ids=lambda path: path.stem
)


@every
def test_the_committed_outputs_are_clean(path):
    assert outputs.faults(nbformat.read(path, as_version=4)) == []


def saved_by_jupyterlab(folder, name, config):
    """A file opened with a kernel and saved unchanged: the server's part is its own, and the
    browser notes which kernel it started (notebook/src/panel.ts: _updateLanguage, _updateSpec)."""
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_server.services.contents.filemanager import FileContentsManager

    manager = FileContentsManager(root_dir=str(folder), config=config)
    content = json.loads(json.dumps(manager.get(name)["content"]))
    spec = {key: get_kernel_dict()[key] for key in ("display_name", "language")}
    content["metadata"]["kernelspec"] = {"name": "python3", **spec}
    content["metadata"]["language_info"] = IPythonKernel.language_info
    manager.save({"type": "notebook", "format": "json", "content": content}, name)
    return (folder / name).read_bytes()


@every
def test_a_notebook_opened_and_saved_in_make_lab_is_the_file_it_was(path, tmp_path):
    folder = str(paths.ROOT / "tools" / "jupyter")
    config = PyFileConfigLoader("jupyter_server_config.py", folder).load_config()
    before, name = path.read_bytes(), path.name
    assert files.notebook_text(files.read_json(path)).encode() == before, "make format"
    (tmp_path / name).write_bytes(before)
    assert saved_by_jupyterlab(tmp_path, name, config) == before
    without = saved_by_jupyterlab(tmp_path, name, Config())
    assert without != before and b"ipykernel" in without


def before_and_after(figure):
    """The pixels of a figure, and of its smaller picture, whose size is checked on the way."""
    kept = io.BytesIO()
    figure.savefig(kept, dpi=144)
    plt.close(figure)
    drawn = base64.b64encode(kept.getvalue()).decode()
    small = outputs.smaller(drawn)
    assert len(small) < 0.6 * len(drawn) and outputs.smaller(drawn) == small
    images = [Image.open(io.BytesIO(base64.b64decode(picture))) for picture in (drawn, small)]
    return [np.asarray(image.convert("RGB")).astype(int) for image in images]


def test_a_stored_picture_looks_the_same():
    rng = np.random.default_rng(0)
    figure, axis = plt.subplots(figsize=(6, 3))
    for _ in range(6):
        axis.plot(rng.normal(size=200).cumsum())
    before, after = before_and_after(figure)
    assert before.shape == after.shape and np.abs(before - after).mean() < 2


def test_every_colour_of_a_figure_survives_in_the_smaller_picture():
    """Also that of a single dot among the anti-aliased edges of everything else."""
    figure, axis = plt.subplots(figsize=(6, 4))
    places = np.random.default_rng(0).uniform(size=(40, 20, 2))
    for i, place in enumerate(places):
        axis.plot(*place.T, color=plt.get_cmap("viridis")(i / 40), linewidth=0.5)
    for i, colour in enumerate(style.COLOURS.values()):
        axis.plot(i / 9, 0.5, "s", color=colour, markersize=4, zorder=9)
    before, after = before_and_after(figure)
    for name, colour in style.COLOURS.items():
        dots = (np.abs(before - np.round(255 * np.array(to_rgb(colour)))) < 2).all(axis=-1)
        assert dots.sum() > 20 and np.abs(before - after)[dots].max() < 32, name
