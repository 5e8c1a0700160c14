"""The actions that make a host ready: a pure decision, printed by --dry-run and carried out unchanged.

On a host psctl keeps, under `runtime.workdir`:

    code/HASH/      psctl's own package, and the folders of jobs, each by the hash of its content
    envs/KEY/       a virtual environment; KEY is a hash of all that decides what is in it
    wheels/HASH/    a wheelhouse that was sent
    ready.json      written last: which code and which Python a job is to use
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from psctl import errors
from psctl.launch.hosts.site import NEEDED, HostSite
from psctl.launch.pins import version_of
from psctl.units import format_bytes, hide_credentials

SPARE_BYTES = 200_000_000
"""Bytes that must be free before anything is installed, so that no installation ends on a full disk."""

FILES, INSTALLED_FILES = 1_000, 20_000
"""Files that a disk must take before anything is sent there, and before packages are installed (torch: 12,000)."""


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; `str()` of one is what --dry-run prints."""


class SendCode(Action, frozen=True):
    """Unpack psctl's own package under its hash."""

    hash: str
    size: int

    def __str__(self) -> str:
        return f"send psctl ({format_bytes(self.size)}) to code/{self.hash[:12]}"


class SendWheels(Action, frozen=True):
    """Unpack the wheelhouse under its hash."""

    hash: str
    size: int

    def __str__(self) -> str:
        return f"send the wheelhouse ({format_bytes(self.size)}) to wheels/{self.hash[:12]}"


class MakeEnvironment(Action, frozen=True):
    """Make a virtual environment; `sees` are the package folders of another Python that it looks into after its own."""

    key: str
    python: str
    minor: str
    pip: bool
    sees: tuple[str, ...] = ()

    def __str__(self) -> str:
        seeing = " that sees the packages already there" if self.sees else ""
        return f"make envs/{self.key} with {self.python}{seeing}"


class Install(Action, frozen=True):
    """Install packages into an environment, from an index, or from a wheelhouse that was sent."""

    key: str
    packages: tuple[str, ...]
    options: tuple[str, ...]
    wheels: str = ""

    def __str__(self) -> str:
        source = f" from wheels/{self.wheels[:12]}" if self.wheels else ""
        return hide_credentials(f"install {' '.join(self.packages)} into envs/{self.key}{source}")


class WriteReady(Action, frozen=True):
    """Write down which code and which Python jobs use."""

    code: str
    key: str  # "" for the host's own Python
    python: str

    def __str__(self) -> str:
        return "write ready.json"


class FindNetwork(Action, frozen=True):
    """With all other hosts: find the addresses by which they reach each other."""

    def __str__(self) -> str:
        return "find the network by which the hosts reach each other"


class MeasureLinks(Action, frozen=True):
    """With all other hosts: measure the links between them."""

    others: int

    def __str__(self) -> str:
        return f"measure the link{'s' if self.others > 1 else ''} to {self.others} host{'s' if self.others > 1 else ''}"


AnyAction = SendCode | SendWheels | MakeEnvironment | Install | WriteReady | FindNetwork | MeasureLinks


class HostNeeds(msgspec.Struct, frozen=True):
    """What a host must have. `torch` is a version, "" for any that is new enough, or None for no torch."""

    code: str
    code_size: int
    managed: bool
    torch: str | None
    requirements: tuple[str, ...] = ()
    index: str | None = None
    wheels: str = ""
    wheels_size: int = 0
    wheels_pip: bool = False
    pins: dict[str, str] = {}  # by name, with hashes (pins.py); empty: what is installed from decides


def decide(site: HostSite, wants: HostNeeds) -> list[AnyAction]:
    """Return the actions for a host, in order; none when it has all that it needs.

    Raises:
        DiskFull, PythonMissing: it cannot be done there.
        InvalidFile: others may write the workdir.
    """
    _check_private(site)
    actions: list[AnyAction] = []
    if not site.codes.get(wants.code):
        actions.append(SendCode(wants.code, wants.code_size))
    environment = _managed(site, wants) if wants.managed else _seeing(site, wants)
    key = environment[0].key if environment else ""
    if environment and site.environments.get(key) is None:
        if wants.wheels and not site.codes.get(wants.wheels):
            actions.append(SendWheels(wants.wheels, wants.wheels_size))
        actions += environment
    ready = WriteReady(wants.code, key, python_of(site, key))
    if (site.ready or {}) != msgspec.to_builtins(ready) or actions:
        actions.append(ready)
    if actions:
        _check_disk(site, actions)
    return actions


def python_of(site: HostSite, key: str) -> str:
    """Return the interpreter of an environment, or the host's own for key ""."""
    return f"{site.workdir}/envs/{key}/bin/python" if key else site.executable


def torch_of(site: HostSite, wants: HostNeeds) -> str:
    """Return the version of torch that workers will meet there, without its build ("2.5.1"); "" for none."""
    found = site.modules.get("torch")
    if not wants.managed and found and not _older(found, NEEDED["torch"]):
        return found.partition("+")[0]
    return (wants.torch or "").partition("+")[0]


def torch_to_ask_for(version: str, *, source: bool) -> str:
    """Return the version of torch that pip is asked for.

    Args:
        version: "2.5.1", or with the label of a build, "2.5.1+cpu", "2.5.1+cu124".
        source: an index or a wheelhouse is given, which decides the build; without one, no label can be asked for.
    """
    number, _, label = version.partition("+")
    return version if source or not re.fullmatch(r"cpu|cu[0-9]+", label) else number


def missing(site: HostSite, wants: HostNeeds) -> list[str]:
    """Return what the host's own Python lacks of what a job needs there, as requirements."""
    found = site.modules
    return [
        need for name, need in _needs(wants).items() if not found.get(name) or _older(found[name] or "", NEEDED[name])
    ]


def _needs(wants: HostNeeds) -> dict[str, str]:
    """Return psctl's needs by module, as requirements; torch as it is wanted."""
    needs = {name: f"{name}>={oldest}" for name, oldest in NEEDED.items() if name != "torch" or wants.torch is not None}
    needs |= {name: f"{name}=={version_of(line)}" for name, line in wants.pins.items() if name in needs}
    if wants.torch:
        needs["torch"] = f"torch=={wants.torch}"
    return needs


def _seeing(site: HostSite, wants: HostNeeds) -> list[MakeEnvironment | Install]:
    """`environment: existing`: only what is missing, in an environment of its own that sees the existing one."""
    packages = missing(site, wants)
    if not packages:
        return []
    key = _key("existing", site.executable, site.minor, *packages)
    has_pip = site.modules.get("pip") is not None
    _check_pip(site, wants, has_pip)
    sees = tuple(site.paths)
    make = MakeEnvironment(key, site.executable, site.minor, pip=not has_pip, sees=sees)
    return [make, Install(key, tuple(packages), _options(wants), wants.wheels)]


def _managed(site: HostSite, wants: HostNeeds) -> list[MakeEnvironment | Install]:
    """`environment: managed`: everything in an environment of its own."""
    packages = [*_needs(wants).values(), *wants.requirements]
    options = _options(wants)
    key = _key("managed", site.minor, wants.wheels, hide_credentials(wants.index or ""), *options, *packages)
    _check_pip(site, wants, has_pip=False)
    make = MakeEnvironment(key, site.executable, site.minor, pip=not wants.wheels_pip)
    return [make, Install(key, tuple(packages), options, wants.wheels)]


def _options(wants: HostNeeds) -> tuple[str, ...]:
    """Return pip's options: packages come from the wheelhouse alone where one was sent."""
    return ("--no-index",) if wants.wheels else ()


def _check_pip(site: HostSite, wants: HostNeeds, has_pip: bool) -> None:
    if not (has_pip or wants.wheels_pip or site.modules.get("ensurepip") is not None or site.modules.get("pip")):
        raise errors.PythonMissing(
            f"{site.name}: {site.executable} has neither pip nor ensurepip, so nothing can be installed for it",
            hint="apt install python3-venv there, or put pip's own wheel into runtime.wheelhouse",
            where=site.name,
        )


def _check_private(site: HostSite) -> None:
    if site.open is not None:
        raise errors.InvalidFile(
            f"{site.name}: {site.open['why']}; what lies in runtime.workdir ({site.workdir}) is run by psctl",
            hint=f"on {site.name}: {site.open['cure']}, or set runtime.workdir to another folder", where=site.name,
        )  # fmt: skip


def _check_disk(site: HostSite, actions: list[AnyAction]) -> None:
    if not site.writable:
        raise errors.DiskFull(
            f"{site.name}: {site.workdir} cannot be written", hint="set runtime.workdir to a folder of yours",
            where=site.name,
        )  # fmt: skip
    installs = any(isinstance(action, Install) for action in actions)
    sent = sum(action.size for action in actions if isinstance(action, (SendCode, SendWheels)))
    if site.free < 2 * sent + (SPARE_BYTES if installs else 0) + 1_000_000:
        raise errors.DiskFull(
            f"{site.name}: {format_bytes(site.free)} left where {site.workdir} is: too little for psctl",
            hint="free space there, or set runtime.workdir to another disk",
            where=site.name,
        )
    if site.inodes is not None and site.inodes < (INSTALLED_FILES if installs else FILES):
        raise errors.DiskFull(
            f"{site.name}: {site.inodes} more files can be made where {site.workdir} is (inodes): too few for psctl",
            hint="remove files there (df -i shows it), or set runtime.workdir to another disk",
            where=site.name,
        )


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _older(found: str, oldest: str) -> bool:
    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0])[:3]]

    return numbers(found) < numbers(oldest)
