"""The section `metrics` of job.yaml: the interval of progress events, and the programs that get the metrics too."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from psctl.spec.fields import Doc, Notation, Section, duration, text, truth
from psctl.spec.yaml_nodes import Scalar
from psctl.types import Address

LOOPBACK = "127.0.0.1"


def _tensorboard() -> Notation:
    on_or_off = truth()

    def parse(scalar: Scalar) -> bool | str:
        if not scalar.null and re.fullmatch(r"(/|~/)[^\0]{0,4000}", scalar.text):
            return scalar.text
        value = on_or_off.parse(scalar)
        assert isinstance(value, bool)
        return value

    schema = {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^(/|~/)"}]}
    return Notation("true, false, or a folder on the head that begins with / or ~/", parse, schema)


def _prometheus() -> Notation:
    def parse(scalar: Scalar) -> Address:
        host, colon, port = scalar.text.rpartition(":")
        if scalar.null or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535 or (colon and not host):
            raise ValueError
        if not colon:
            return Address(LOOPBACK, int(port))
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if bare == "localhost":
            return Address(LOOPBACK, int(port))
        address = ipaddress.ip_address(bare)
        if address.version == 6 and bare == host:
            raise ValueError(f"expected brackets around an IPv6 address, such as [::1]:9464, got {scalar.written()}")
        return Address(str(address), int(port))

    def checked(scalar: Scalar) -> Address:
        try:
            return parse(scalar)
        except ipaddress.AddressValueError as error:
            raise ValueError from error
        except ValueError as error:
            own = str(error).startswith("expected brackets")
            raise ValueError(str(error) if own else "") from error

    schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string", "pattern": ":[0-9]+$"}]}
    return Notation("a port, 1..65535, or NUMERIC-ADDRESS:PORT such as 10.0.0.1:9464", checked, schema)


def _mlflow() -> Notation:
    pattern = r"databricks|[a-z][a-z0-9+]*:[^\s\0]{1,2000}"

    def parse(scalar: Scalar) -> str:
        if scalar.null or not re.fullmatch(pattern, scalar.text):
            raise ValueError
        if re.match(r"[a-z0-9+]+://[^/]*@", scalar.text):
            raise ValueError(
                "a URI with a password would be in every checkpoint; expected one without it, and "
                "`secrets: [MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD]`"
            )
        return scalar.text

    expected = "a URI such as https://mlflow.example.org or sqlite:////data/mlflow.db"
    return Notation(expected, parse, {"type": "string", "pattern": f"^({pattern})$".replace(r"\0", "")})


class MetricsSpec(Section, frozen=True):
    """The record of the run."""

    interval: Annotated[float, duration(3600, 0.1), Doc("Time between two progress events.")] = 1.0
    tensorboard: Annotated[
        bool | str,
        _tensorboard(),
        Doc("true: write event files for TensorBoard to the job's folder on the head; PATH: to PATH/JOB there."),
    ] = False
    prometheus: Annotated[
        Address | None,
        _prometheus(),
        Doc("PORT or ADDRESS:PORT on which the head serves metrics for Prometheus; PORT alone: on 127.0.0.1."),
    ] = None
    mlflow: Annotated[
        str | None, _mlflow(), Doc("URI of an MLflow server or database that gets the metrics; null: none.")
    ] = None
    wandb: Annotated[
        str | None,
        text("PROJECT or ENTITY/PROJECT", r"([A-Za-z0-9][\w.-]{0,127}/)?[A-Za-z0-9][\w.-]{0,127}"),
        Doc("Project in Weights & Biases that gets the metrics; offline unless WANDB_API_KEY is among `secrets`."),
    ] = None
