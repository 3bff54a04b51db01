"""What the texts of a spec must look like, so that no shell, cluster or storage refuses or misreads them."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from k3jax.config import ConfigError, require


class Form(NamedTuple):
    """A regular expression, and what it means in words."""

    pattern: str
    words: str


LABEL = r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
DNS = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
BUCKET = r"[a-z0-9]([-_a-z0-9]{0,61}[a-z0-9])?"
LOWER = "lower-case letters, digits and dashes, with a letter or a digit at both ends"

RUN = Form(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "up to 40 lower-case letters, digits and dashes, with a letter first")
WORD = Form(r"[!-~]+", "ASCII characters without a space")
PART = Form(DNS, f"up to 63 {LOWER}")
DOMAIN = Form(rf"(?=.{{1,253}}$){DNS}(\.{DNS})*", f"{LOWER}, and dots")
NODE_LABEL = Form(LABEL, "letters, digits and '-_.', with a letter or a digit at both ends")
OPTION = Form(r"--?[a-zA-Z][ -~]*", "an option of sbatch on one line, such as --constraint=h200")
SLURM_TIME = Form(
    r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|(?i:unlimited|infinite)",
    "M, M:S, H:M:S, D-H, D-H:M or D-H:M:S of days, hours, minutes and seconds (1-00:00:00 is a day), or UNLIMITED",
)
VARIABLE = Form(r"[A-Za-z_][A-Za-z0-9_]*=.*", "NAME=value")
LABELED = Form(rf"{LABEL}=({LABEL})?", "name=value, in letters, digits and '-_.'")
# By the scheme of a storage: the name of the bucket or the claim.
OWNERS = {
    "gs": Form(rf"(?=.{{3,222}}$){BUCKET}(\.{BUCKET})*", f"3 to 63 {LOWER}; underscores and dots are allowed between"),
    "s3": Form(rf"(?=.{{3,63}}$){DNS}(\.{DNS})*", f"3 to 63 {LOWER}; dots are allowed between"),
    "pvc": DOMAIN,
}  # fmt: skip


def check_form(config: Any, form: Form, *names: str) -> None:
    """Raises ConfigError for a field that has neither the form nor its default; of a tuple, for an item."""
    for name in names:
        value = getattr(config, name)
        for text in value if isinstance(value, tuple) else (value,):
            require(
                text == getattr(type(config), name, None) or re.fullmatch(form.pattern, text) is not None,
                f"{type(config).__name__}.{name} = {text!r}, but it must be {form.words}",
            )


def check_lines(config: Any, *, several: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a text with a character that cannot be printed, as a line break or NUL; the fields of
    ``several`` may have several lines."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            shown = re.sub(r"[\n\t]", "", text) if field.name in several else text
            odd = next((char for char in shown if not char.isprintable()), "") if isinstance(text, str) else ""
            lines = "printable characters" if field.name in several else "one line of printable characters"
            require(not odd, f"{type(config).__name__}.{field.name} has {odd!r} in {text!r}, but it must be {lines}")


def check_pairs(config: Any, name: str, form: Form, reserved: Mapping[str, str]) -> None:
    """Raises ConfigError for an item that is not of the form, a name that is ``reserved`` (with the reason), or one
    that stands there twice."""
    field, seen = f"{type(config).__name__}.{name}", set()
    for pair in getattr(config, name):
        require(
            re.fullmatch(form.pattern, pair, re.DOTALL) is not None,
            f"{field} has {pair!r}, but it must be of the form {form.words}",
        )
        key = pair.partition("=")[0]
        require(key not in reserved, f"{field} sets {key}, but {reserved.get(key)}")
        require(key not in seen, f"{field} sets {key} twice")
        seen.add(key)


@contextlib.contextmanager
def field_for_flag(field: str, flag: str, text: str) -> Iterator[None]:
    """Whatever is said of a command's flag is said of a field: the text was no flag of the command under way."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{field} = {text!r}: {str(error).removeprefix(f'--{flag}={text}: ')}") from error
