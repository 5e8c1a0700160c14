"""Decides the actions that make a host ready. The decision is pure: --dry-run prints it, `up` carries it out unchanged.

Layout of `runtime.workdir` on a host:

    code/HASH/      psctl's own package, and the folders of jobs, each under the hash of its content
    envs/KEY/       a virtual environment; KEY is a hash of everything that determines its content
    wheels/HASH/    a wheelhouse that was sent
    ready.json      the code and the Python that jobs use; written last
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
"""Bytes that must be free before packages are installed, so that no installation fills the disk."""

FILES, INSTALLED_FILES = 1_000, 20_000
"""Free inodes that are required before files are sent, and before packages are installed (torch has 12,000 files)."""


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base class of all actions; `str(action)` is the line that --dry-run prints."""


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
    """Make a virtual environment; `sees` are package folders of another Python that it searches after its own."""

    key: str
    python: str
    minor: str
    pip: bool
    sees: tuple[str, ...] = ()

    def __str__(self) -> str:
        seeing = " that sees the packages already there" if self.sees else ""
        return f"make envs/{self.key} with {self.python}{seeing}"


class Install(Action, frozen=True):
    """Install packages into an environment, from an index or from a wheelhouse that was sent."""

    key: str
    packages: tuple[str, ...]
    options: tuple[str, ...]
    wheels: str = ""

    def __str__(self) -> str:
        source = f" from wheels/{self.wheels[:12]}" if self.wheels else ""
        return hide_credentials(f"install {' '.join(self.packages)} into envs/{self.key}{source}")


class WriteReady(Action, frozen=True):
    """Record the code and the Python that jobs use."""

    code: str
    key: str  # "" for the host's own Python
    python: str

    def __str__(self) -> str:
        return "write ready.json"


class FindNetwork(Action, frozen=True):
    """Find, together with all other hosts, the addresses by which they reach each other."""

    def __str__(self) -> str:
        return "find the network by which the hosts reach each other"


class MeasureLinks(Action, frozen=True):
    """Measure, together with all other hosts, the links between them."""

    others: int

    def __str__(self) -> str:
        return f"measure the link{'s' if self.others > 1 else ''} to {self.others} host{'s' if self.others > 1 else ''}"


class MeasureMessages(Action, frozen=True):
    """Measure, together with all other hosts, the cost of messages of each engine."""

    def __str__(self) -> str:
        return "measure the cost of messages"


AnyAction = (
    SendCode | SendWheels | MakeEnvironment | Install | WriteReady | FindNetwork | MeasureLinks | MeasureMessages
)


class HostNeeds(msgspec.Struct, frozen=True):
    """The requirements of a host. `torch` is a version, "" for any that is new enough, or None for no torch."""

    code: str
    code_size: int
    managed: bool
    torch: str | None
    requirements: tuple[str, ...] = ()
    index: str | None = None
    wheels: str = ""
    wheels_size: int = 0
    wheels_pip: bool = False
    pins: dict[str, str] = {}  # requirements with hashes by name (pins.py); empty: any version of the source


def decide(site: HostSite, needs: HostNeeds) -> list[AnyAction]:
    """Return the actions for a host, in order; an empty list when the host is ready.

    Raises:
        DiskFull, PythonMissing: the host cannot be made ready.
        InvalidFile: other users may write to the workdir.
    """
    _check_private(site)
    actions: list[AnyAction] = []
    if not site.codes.get(needs.code):
        actions.append(SendCode(needs.code, needs.code_size))
    environment = _managed(site, needs) if needs.managed else _existing(site, needs)
    key = environment[0].key if environment else ""
    if environment and site.environments.get(key) is None:
        if needs.wheels and not site.codes.get(needs.wheels):
            actions.append(SendWheels(needs.wheels, needs.wheels_size))
        actions += environment
    ready = WriteReady(needs.code, key, python_of(site, key))
    if (site.ready or {}) != msgspec.to_builtins(ready) or actions:
        actions.append(ready)
    if actions:
        _check_disk(site, actions)
    return actions


def python_of(site: HostSite, key: str) -> str:
    """Return the path of an environment's interpreter, or of the host's own for key ""."""
    return f"{site.workdir}/envs/{key}/bin/python" if key else site.executable


def torch_of(site: HostSite, needs: HostNeeds) -> str:
    """Return the version of torch that workers of the host import, without its build ("2.5.1"); "" for none."""
    found = site.modules.get("torch")
    if not needs.managed and found and not _older(found, NEEDED["torch"]):
        return found.partition("+")[0]
    return (needs.torch or "").partition("+")[0]


def torch_to_ask_for(version: str, *, source: bool) -> str:
    """Return the version of torch that pip is to install.

    Args:
        version: "2.5.1", or with the label of a build, "2.5.1+cpu", "2.5.1+cu124".
        source: whether an index or a wheelhouse is given; without one, the label of a build is dropped, because the
            default index has none.
    """
    number, _, label = version.partition("+")
    return version if source or not re.fullmatch(r"cpu|cu[0-9]+", label) else number


def missing(site: HostSite, needs: HostNeeds) -> list[str]:
    """Return the requirements of a job that the host's own Python does not meet."""
    found = site.modules
    return [
        need
        for name, need in _requirements(needs).items()
        if not found.get(name) or _older(found[name] or "", NEEDED[name])
    ]


def _requirements(needs: HostNeeds) -> dict[str, str]:
    """Return the requirements of psctl by module, with torch in the requested version."""
    required = {
        name: f"{name}>={oldest}" for name, oldest in NEEDED.items() if name != "torch" or needs.torch is not None
    }
    required |= {name: f"{name}=={version_of(line)}" for name, line in needs.pins.items() if name in required}
    if needs.torch:
        required["torch"] = f"torch=={needs.torch}"
    return required


def _existing(site: HostSite, needs: HostNeeds) -> list[MakeEnvironment | Install]:
    """Return the actions for `environment: existing`: missing packages go to an environment that sees the old."""
    packages = missing(site, needs)
    if not packages:
        return []
    key = _key("existing", site.executable, site.minor, *packages)
    has_pip = site.modules.get("pip") is not None
    _check_pip(site, needs, has_pip)
    sees = tuple(site.paths)
    make = MakeEnvironment(key, site.executable, site.minor, pip=not has_pip, sees=sees)
    return [make, Install(key, tuple(packages), _options(needs), needs.wheels)]


def _managed(site: HostSite, needs: HostNeeds) -> list[MakeEnvironment | Install]:
    """Return the actions for `environment: managed`: all packages go to an environment of psctl."""
    packages = [*_requirements(needs).values(), *needs.requirements]
    options = _options(needs)
    key = _key("managed", site.minor, needs.wheels, hide_credentials(needs.index or ""), *options, *packages)
    _check_pip(site, needs, has_pip=False)
    make = MakeEnvironment(key, site.executable, site.minor, pip=not needs.wheels_pip)
    return [make, Install(key, tuple(packages), options, needs.wheels)]


def _options(needs: HostNeeds) -> tuple[str, ...]:
    """Return pip's options: where a wheelhouse was sent, it is the only source of packages."""
    return ("--no-index",) if needs.wheels else ()


def _check_pip(site: HostSite, needs: HostNeeds, has_pip: bool) -> None:
    if not (has_pip or needs.wheels_pip or site.modules.get("ensurepip") is not None or site.modules.get("pip")):
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
