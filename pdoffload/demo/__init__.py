"""The demo: one long prompt, three ways. Computed; brought back from memory; brought back from disk.

    pdoffload demo MODEL_DIR

A real vLLM server runs with a host pool and a file tier. Every figure in the table is the difference
of two readings of the server's own /metrics; a hit that did not happen is a failed demo.
Reading order: `scenario` runs the servers, `verdict` judges, `report` shows.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pdoffload.errors import PdOffloadError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(model_dir: Path, work_dir: Path | None, keep: bool) -> int:
    """Run the demo with the checkpoint in `model_dir`; the exit status, 0 if every step held.

    Chunks and logs go into a new folder inside `work_dir` (a temporary directory where it is None).
    The folder is removed at the end unless `keep` is set or the demo failed: then its path is shown.
    """
    from pdoffload.demo.report import Report
    from pdoffload.demo.scenario import Scenario
    from pdoffload.demo.verdict import judge

    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pdoffload-demo-", dir=work_dir))
    report = Report()
    try:
        with report.progress():
            result = Scenario(model_dir, folder, report).run()
    except PdOffloadError as error:
        report.failed([str(error)], folder)
        return EXIT_FAILED
    except KeyboardInterrupt:
        report.failed(["interrupted"], folder)
        return EXIT_INTERRUPTED
    problems = judge(result)
    report.table(result)
    if problems:
        report.failed(problems, folder)
        return EXIT_FAILED
    report.passed(result, folder if keep else None)
    if not keep:
        shutil.rmtree(folder)
    return 0
