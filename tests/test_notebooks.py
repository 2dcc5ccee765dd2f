"""Every notebook runs, and prints what is stored in it."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS_PER_CELL = 300


def visible_text(cell: Any) -> str:
    """What a reader sees under the cell as text: standard output and plain results. Pictures and warnings are left out.

    Addresses differ from run to run everywhere. In a cell tagged "timing" numbers and spacing may differ too.
    """
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            parts.append(output.data.get("text/plain", "") + "\n")
    text = re.sub(r"0x[0-9a-fA-F]+", "0x...", "".join(parts))
    if "timing" in cell.metadata.get("tags", []):
        text = " ".join(re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text).split())
    return text.rstrip()


def stored_faults(notebook: Any) -> list[str]:
    """What must not be stored: errors, warnings, cells that were never run or in another order."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    faults = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        faults.append("cells were not run once each from top to bottom; restart the kernel, run all, save")
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error" or (output.output_type == "stream" and output.name == "stderr"):
                faults.append(f"an error or a warning is stored under:\n{cell.source}")
    return faults


def run_faults(notebook: Any, folder: Path) -> list[str]:
    """Run a copy of the notebook in `folder` and compare what it prints with what is stored."""
    fresh = nbformat.from_dict(notebook)
    client = NotebookClient(fresh, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    except CellExecutionError as error:
        return [str(error)]
    faults = []
    for old, new in zip(notebook.cells, fresh.cells, strict=True):
        if old.cell_type == "code" and visible_text(old) != visible_text(new):
            faults.append(f"the output differs under:\n{old.source}\n--- stored\n{visible_text(old)}\n--- now\n{visible_text(new)}")
    return faults


@pytest.fixture(autouse=True)
def own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run notebooks with this interpreter, whatever kernel of the same name the user has installed."""
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    faults = stored_faults(notebook) + run_faults(notebook, NOTEBOOKS)
    assert not faults, "\n\n".join(faults)


def small_notebook(*cells: tuple[str, str, list[str]]) -> Any:
    """A notebook of (source, stored standard output, tags)."""
    notebook = nbformat.v4.new_notebook()
    for count, (source, text, tags) in enumerate(cells, 1):
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=count, outputs=outputs, metadata={"tags": tags}))
    return notebook


@pytest.mark.slow
def test_differences_are_found(tmp_path: Path) -> None:
    clock = "import time\nprint('took', time.perf_counter(), 's')"
    same = small_notebook(("print('a'); print(object())", "a\n<object object at 0x7f>\n", []), (clock, "took   1.5 s\n", ["timing"]))
    assert stored_faults(same) + run_faults(same, tmp_path) == []
    other = small_notebook(("x = 1\nprint(x)", "2\n", []), ("print('unstored')", "", []), (clock, "used 1.5 s\n", ["timing"]))
    faults = run_faults(other, tmp_path)
    assert [fault.splitlines()[1] for fault in faults] == ["x = 1", "print('unstored')", "import time"]
    assert "ZeroDivisionError" in run_faults(small_notebook(("1 / 0", "", [])), tmp_path)[0]


def test_stored_faults_are_found() -> None:
    notebook = small_notebook(("x = 1", "", []), ("x", "", []))
    notebook.cells[1].execution_count = 5
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stderr", text="careful")]
    assert len(stored_faults(notebook)) == 2
