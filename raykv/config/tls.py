"""Settings of TLS."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from raykv.config.base import Model


def _require_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path, because every process of the cluster reads it")
    return path


PemFile = Annotated[Path, AfterValidator(_require_absolute)]


class TlsConfig(Model):
    """Files for TLS 1.3 on all TCP connections between hosts. Both ends of a connection show a certificate.

    All files are in PEM format, at the same paths on every host. New connections use files that were replaced.

    Attributes:
        certificate: This process's certificate, and behind it the certificates of intermediate CAs. Each process acts
            as server and as client, so an extendedKeyUsage must allow both. Names in it are not checked.
        private_key: The private key of the certificate, without a passphrase. Only its user should be able to read it.
        ca: Certificates of the CAs that sign the certificates of the cluster's processes. Use CAs that sign nothing
            else, because every certificate of these CAs passes TLS.
    """

    certificate: PemFile
    private_key: PemFile
    ca: PemFile
