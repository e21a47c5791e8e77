"""`quarry extract` with marks: `python -m benchmarks.startup_cli extract JOB --out DIR`.

The command itself is the program's; what its display is shown is marked, so the store's own times are kept.
"""

from benchmarks.startup_marks import mark, marked


def main() -> None:
    """Run the command line of this process."""
    from service.cli import entry, files, progress_bar

    mark("the command line is imported")
    files.own_roots = marked("the job file is read", files.own_roots)
    plain = progress_bar.Lines.show

    def show(self: progress_bar.Lines, event: progress_bar.Event) -> None:
        progress = event.progress
        for reached, stage in (
            (progress.units_planned > 0, "the first unit is planned"),
            (progress.plan_done, "the plan is done"),
            (progress.units_done > 0, "the first unit is committed"),
            (event.state == "completed", "the job is completed"),
        ):
            if reached:
                mark(stage, event.at.timestamp())
        plain(self, event)

    progress_bar.Lines.show = show  # type: ignore[method-assign]
    entry.main()


if __name__ == "__main__":
    main()
