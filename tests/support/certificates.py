"""A CA and certificates for tests of TLS, made by the program `openssl`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from raykv.config import TlsConfig


class Authority:
    """A CA. All its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the program openssl, which makes certificates for this test, is not installed")
        folder.mkdir()
        self.folder, self._ca, self._key = folder, folder / "ca.pem", folder / "ca.key"
        self._openssl(
            "req", "-x509", *_new_key(self._key), "-out", self._ca, "-subj", f"/CN=ca-{folder.name}", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    def issue(self, name: str, *, days: int = 2, extensions: str = "basicConstraints=CA:FALSE") -> TlsConfig:
        """Make a key and a certificate, which expires in `days` days. `extensions`: lines of an extension file."""
        key, request, certificate = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extension_file = self.folder / f"{name}.cnf"
        extension_file.write_text(extensions)
        self._openssl("req", "-new", *_new_key(key), "-out", request, "-subj", f"/CN={name}")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self._ca, "-CAkey", self._key, "-days", str(days),
            "-extfile", extension_file, "-out", certificate,
        )  # fmt: skip
        return TlsConfig(certificate=certificate, private_key=key, ca=self._ca)

    def encrypt_key(self, config: TlsConfig) -> TlsConfig:
        """Return the config with a copy of the private key that has a passphrase."""
        key = self.folder / "encrypted.key"
        self._openssl("pkey", "-in", config.private_key, "-aes128", "-passout", "pass:secret", "-out", key)
        return config.model_copy(update={"private_key": key})

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


def _new_key(path: Path) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(path)]
