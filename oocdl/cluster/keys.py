"""TLS for one cluster: a certificate authority of its own, and keys that it alone has signed.

Dask takes its authority for the only proof of who somebody is, so each cluster has another. The
authority's key is never written and forgotten at once. The scheduler's and client's keys stay in memory;
those of workers are in files that their jobs read: folder 0700, files 0600.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed.security import Security

from oocdl.errors import InputError

VALID_DAYS = 30
"""Number of days for which keys are valid, and after which those of another machine are removed."""
ORPHAN_SECONDS = 60.0
"""Age from which keys that nobody has locked are those of a process that is gone."""
CLOCKS_DAYS = 1
"""Number of days by which the clocks of nodes may be behind."""
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "worker-cert.pem", "worker-key.pem"


class _Pair(NamedTuple):
    """A private key, and the certificate for its public one."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_text(self) -> str:
        """Return the private key, as PEM."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()

    def certificate_text(self) -> str:
        """Return the certificate, as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()


def make_keys(shared: Path) -> tuple[Path, Security]:
    """Make the keys of a cluster; returns the folder of those that are files, and all of them for Dask.

    Raises InputError if the folder cannot be made.
    """
    _remove_orphans(shared)
    folder = shared / f"keys-{socket.gethostname()}-{secrets.token_hex(8)}"
    authority = _pair("oocdl-authority", None)
    here, worker = _pair("oocdl-client", authority), _pair("oocdl-worker", authority)
    texts = {
        CA_FILE: authority.certificate_text(),
        CERTIFICATE_FILE: worker.certificate_text(),
        KEY_FILE: worker.key_text(),
    }
    try:
        shared.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        _held[folder] = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: they stay until they have expired
            fcntl.flock(_held[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name, text in texts.items():
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(text)
    except OSError as error:
        remove_keys(folder)
        raise InputError(
            f"keys cannot be written to {shared} ({error.strerror}); name a folder that all nodes see "
            "with shared="
        ) from None
    return folder, security_of(folder, here.key_text(), here.certificate_text())


def remove_keys(folder: Path) -> None:
    """Remove the keys of a cluster that has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _held:
        os.close(_held.pop(folder))


_held: dict[Path, int] = {}
"""Folders of this process's keys -> the descriptor that keeps each locked as long as the process lives."""


def _remove_orphans(shared: Path) -> None:
    """Remove keys of processes of this machine that were killed, and those that have expired."""
    for folder in shared.glob("keys-*"):
        with suppress(OSError):  # it is another user's, or was removed meanwhile
            age = time.time() - folder.stat().st_mtime
            if age > (VALID_DAYS + CLOCKS_DAYS) * 86400:
                shutil.rmtree(folder)
            elif age > ORPHAN_SECONDS and folder.name.startswith(f"keys-{socket.gethostname()}-"):
                handle = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(handle)


def security_of(folder: Path | str, key: str = "", certificate: str = "") -> Security:
    """Return what Dask needs: the files of a folder for workers, a key and certificate for the other two."""
    return Security(  # type: ignore[no-untyped-call]
        require_encryption=True,
        tls_ca_file=f"{folder}/{CA_FILE}",
        tls_worker_key=f"{folder}/{KEY_FILE}",
        tls_worker_cert=f"{folder}/{CERTIFICATE_FILE}",
        tls_scheduler_key=key,
        tls_scheduler_cert=certificate,
        tls_client_key=key,
        tls_client_cert=certificate,
    )


def _pair(name: str, issuer: _Pair | None) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=CLOCKS_DAYS))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    return _Pair(key, builder.sign(key if issuer is None else issuer.key, hashes.SHA256()))
