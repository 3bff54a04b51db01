"""`python -m k3jax.report RUN [RUN ...]`; see `k3jax.report`."""

from absl import app, flags

from k3jax.report import ReportError, write_report


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        raise app.UsageError(
            "python -m k3jax.report RUN [RUN ...] [--out FOLDER] [--x step|tokens|seconds] [--nocharts]"
        )
    try:
        page = write_report(*arguments[1:], out=flags.FLAGS.out, x=flags.FLAGS.x, charts=flags.FLAGS.charts)
    except (ReportError, OSError) as error:
        raise SystemExit(f"k3jax.report: {error}") from error
    print(page)
    print(page.with_name("loss.png"))


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "folder for the report; by default the run's own, see the package's docstring")
    flags.DEFINE_bool("charts", True, "also write charts/SECTION.png, a PNG for every section")
    flags.DEFINE_enum("x", "step", ["step", "tokens", "seconds"], "what the horizontal axes count")
    app.run(main)
