"""The demos: one long prompt, several ways, on real vLLM servers.

    pdoffload demo MODEL_DIR       computed; brought back from memory; brought back from disk
    pdoffload demo-pd MODEL_DIR    computed; pulled from a prefiller; its prefix pulled; computed again

Every figure in a table is the difference of two readings of the server's own /metrics; a hit that did not
happen is a failed demo. Reading order: `scenario` and `pair` run the servers, `verdict` judges, `report`
shows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdoffload.errors import PdOffloadError

if TYPE_CHECKING:
    from pdoffload.demo.report import Report
    from pdoffload.demo.verdict import Outcome

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(model_dir: Path, work_dir: Path | None, keep: bool) -> int:
    """Run the demo with one server and the checkpoint in `model_dir`; the exit status, 0 if every step held.

    Chunks and logs go into a new folder inside `work_dir` (a temporary directory where it is None).
    The folder is removed at the end unless `keep` is set or the demo failed: then its path is shown.
    """
    from pdoffload.demo.scenario import RestartScenario

    return _show(
        lambda folder, report: RestartScenario(model_dir, folder, report).run(), work_dir, keep
    )


def run_pair(model_dir: Path, work_dir: Path | None, keep: bool) -> int:
    """The same with two servers, a prefiller and a decoder."""
    from pdoffload.demo.pair import PairScenario

    return _show(
        lambda folder, report: PairScenario(model_dir, folder, report).run(), work_dir, keep
    )


def _show(play: Callable[[Path, Report], Outcome], work_dir: Path | None, keep: bool) -> int:
    from pdoffload.demo.report import Report

    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pdoffload-demo-", dir=work_dir))
    report = Report()
    try:
        with report.progress():
            outcome = play(folder, report)
    except PdOffloadError as error:
        report.failed([str(error)], folder)
        return EXIT_FAILED
    except KeyboardInterrupt:
        report.failed(["interrupted"], folder)
        return EXIT_INTERRUPTED
    problems = outcome.problems()
    report.table(outcome)
    if problems:
        report.failed(problems, folder)
        return EXIT_FAILED
    report.passed(outcome, folder if keep else None)
    if not keep:
        shutil.rmtree(folder)
    return 0
