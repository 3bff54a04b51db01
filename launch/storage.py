"""Where runs and data lie, and whether this machine may speak for those who own it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from k3jax.config import ConfigError, require
from launch.values import OWNERS

RUNS, DATA = "/mnt/runs", "/mnt/data"


@dataclass(frozen=True)
class Place:
    """A folder. kind: 'path', 'gs', 's3' or 'pvc'; owner: the bucket or the claim, empty for a path."""

    text: str
    kind: str
    owner: str
    folder: str

    @property
    def is_bucket(self) -> bool:
        return self.kind in ("gs", "s3")


def parse(text: str) -> Place | None:
    """Reads a POSIX path, ``gs://bucket/folder``, ``s3://bucket/folder`` or ``pvc://claim/folder``; None for nothing.

    Raises:
      ConfigError: another scheme, a bucket or a claim whose name is none, or a folder that would be misread.
    """
    if not text:
        return None
    scheme, separator, rest = text.partition("://")
    if not separator:
        _check_path(text)
        return Place(text, "path", "", text)
    owner, _, folder = rest.partition("/")
    require(
        scheme in OWNERS and owner != "",
        f"storage {text!r} is no path, gs://bucket/folder, s3://bucket/folder or pvc://claim/folder",
    )
    what = "a volume claim" if scheme == "pvc" else "a bucket"
    require(
        re.fullmatch(OWNERS[scheme].pattern, owner) is not None,
        f"storage {text!r}: {owner!r} is no name of {what}, which is {OWNERS[scheme].words}",
    )
    folder = folder.strip("/")
    require(
        "," not in folder and not {".", ".."} & set(folder.split("/")),
        f"storage {text!r}: the folder {folder!r} is mounted as it is written, so it must have no comma, '.' or '..'",
    )
    return Place(text, scheme, owner, folder)


def _check_path(text: str) -> None:
    """Raises ConfigError for what only looks like a path."""
    scheme, _, rest = text.partition(":")
    right = f"{scheme}://{rest.lstrip('/')}"
    require(scheme not in OWNERS or scheme == text, f"storage {text!r} is no path; a bucket or a claim is {right}")
    require(not text.startswith("~"), f"storage {text!r}: no '~' is expanded; write the folder out, as /home/me/runs")


def absolute(text: str, engine: str) -> str:
    """A folder that all machines of an engine share.

    Raises:
      ConfigError: a bucket or a claim, or a path that depends on where one stands.
    """
    place = parse(text)
    if place.kind != "path":
        raise ConfigError(f"{engine} cannot mount {text!r}: give the path of a file system that all its hosts share")
    require(
        text.startswith("/") or engine == "local", f"storage {text!r} must be an absolute path, the same on all hosts"
    )
    return text


def refuse_path(place: Place, engine: str) -> None:
    """Raises ConfigError for a path where machines come and go with what is on their disks."""
    if place.kind == "path":
        known = "gs://bucket/folder or pvc://claim/folder" if engine == "gke" else "gs://bucket/folder"
        raise ConfigError(f"{engine}: {place.text!r} would be lost with its machine; give {known}")


def fuse_options(place: Place) -> str:
    """How Cloud Storage FUSE mounts a bucket: hosts must see at once what another one has written or renamed."""
    only = [f"only-dir={place.folder}"] if place.folder else []
    return ",".join(["implicit-dirs", "metadata-cache:ttl-secs:0", *only])


def check_credentials(place: Place) -> None:
    """Raises ConfigError for a bucket that this machine has no credentials for. Nothing is sent anywhere."""
    problem = {"gs": _no_google, "s3": _no_amazon}.get(place.kind, lambda: None)()
    if problem:
        raise ConfigError(f"storage {place.text!r}: {problem}")


def _no_google() -> str | None:
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        found = Path(named).is_file()
        return None if found else f"GOOGLE_APPLICATION_CREDENTIALS names {named!r}, but there is no such file"
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
    if (folder / "application_default_credentials.json").is_file():
        return None
    return (
        f"no credentials in {folder}: run `gcloud auth application-default login`, or set "
        "GOOGLE_APPLICATION_CREDENTIALS to a key file"
    )


def _no_amazon() -> str | None:
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return None
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    if file.is_file():
        return None
    return f"no credentials in {file}: run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
