"""`python -m k3jax.report RUN_DIR`."""

from absl import app

from k3jax.report import ReportError, write_report


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError("python -m k3jax.report RUN_DIR")
    try:
        page = write_report(arguments[1])
    except (ReportError, OSError) as error:
        raise SystemExit(f"k3jax.report: {error}") from error
    print(f"{page}\n{page.with_name('loss.png')}")


if __name__ == "__main__":
    app.run(main)
