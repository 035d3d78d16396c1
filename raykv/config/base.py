"""The base class of all configs, and types of their fields."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from raykv.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLOT_ALIGNMENT_NBYTES = 4096
"""Slots start at multiples of this many bytes (one page), so that direct I/O and memory registration need no copy."""

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}


def parse_nbytes(value: object) -> object:
    """Convert text such as "512 MiB" to a number of bytes. Values of other types are returned unchanged.

    Raises:
        ValueError: The text is not a size, or has a decimal unit. GB is refused because many people mean GiB.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes as a number, or text such as '512 MiB' or '4 GiB'")
    return int(float(found[1]) * _UNITS[found[2].lower()])


Nbytes = Annotated[int, BeforeValidator(parse_nbytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Rdma = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*$")]
Nics = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+){0,15}$")]
SocketLibrary = Annotated[str, Field(pattern=r"^[^\s:]+$", max_length=4096)]
"""A shared library: its name, or its path. LD_PRELOAD separates names by spaces and colons."""
Nixl = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(,[A-Za-z0-9_]+){0,7}$")]
HugePages = Literal["try", "require", "never"]


def rdma_devices(value: str, *, tls: bool) -> tuple[str, ...] | None:
    """Return the names in a field of type Rdma: None for "off", empty for "auto", which means all devices.

    `tls`: whether the cluster uses TLS. RDMA does not encrypt, so "auto" then means "off".
    """
    if value == "auto":
        return None if tls else ()
    return None if value == "off" else tuple(value.split(","))


def nixl_backends(value: str, *, tls: bool) -> tuple[str, ...]:
    """Return the backends in a field of type Nixl: none for "off", UCX for "auto" without `tls`."""
    if value == "auto":
        return () if tls else ("UCX",)
    return () if value == "off" else tuple(value.split(","))


def nic_names(value: str) -> tuple[str, ...]:
    """Return the names and addresses in a field of type Nics. "auto" and "off" name none."""
    return () if value in ("auto", "off") else tuple(value.split(","))


class Model(BaseModel):
    """Base class of all configs. A config is frozen and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Check `fields` and make the config.

        Raises:
            ConfigError: A field is wrong or unknown. The message names every such field. For an unknown field it also
                lists the known fields.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or model.__name__
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown field '{where}'; {model.__name__} has: {', '.join(sorted(model.model_fields))}")
        else:
            lines.append(f"field '{where}': {problem['msg']} (got {problem['input']!r})")
    return f"{model.__name__}: " + "; ".join(lines)
