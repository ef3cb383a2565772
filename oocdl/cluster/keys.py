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
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed.security import Security

from oocdl.errors import InputError
from oocdl.storage.cache.spill_store import prefix_of

VALID_DAYS = 30
"""Number of days for which keys are valid, and after which those of another machine are removed."""
ORPHAN_SECONDS = 60.0
"""Age from which keys that nobody has locked are those of a process that is gone."""
CLOCKS_DAYS = 1
"""Number of days by which the clocks of nodes may be behind."""
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "worker-cert.pem", "worker-key.pem"
LOCK_FILE = "lock"
"""Locked as long as the process of a cluster lives."""


class _Pair(NamedTuple):
    """A private key, and the certificate for its public one."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_text(self) -> str:
        """Return the private key, as PEM."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()

    def certificate_text(self) -> str:
        """Return the certificate, as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()


def make_keys(shared: Path) -> tuple[Path, Security, ExitStack]:
    """Make the keys of a cluster; remove those of clusters whose processes were killed.

    Returns the folder of those that are files, all of them for Dask, and what removes them when it is closed.
    Raises InputError if the folder cannot be made.
    """
    _remove_orphans(shared)
    folder = shared / f"{prefix_of('keys')}{secrets.token_hex(8)}"
    authority = _pair("oocdl-authority", None)
    here, worker = _pair("oocdl-client", authority), _pair("oocdl-worker", authority)
    texts = {
        CA_FILE: authority.certificate_text(),
        CERTIFICATE_FILE: worker.certificate_text(),
        KEY_FILE: worker.key_text(),
    }
    with ExitStack() as undo:
        try:
            shared.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = undo.enter_context(_new(folder / LOCK_FILE))
            with suppress(OSError):  # a file system without locks: keys stay until they have expired
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name, text in texts.items():
                with _new(folder / name) as file:
                    file.write(text)
        except OSError as error:
            raise InputError(
                f"keys cannot be written to {shared} ({error.strerror}); name a folder that all nodes see "
                "with shared="
            ) from None
        return folder, security_of(folder, here.key_text(), here.certificate_text()), undo.pop_all()


def _new(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def _remove_orphans(shared: Path) -> None:
    """Remove keys of processes of this machine that were killed, and those that have expired."""
    for folder in shared.glob("keys-*"):
        with suppress(OSError):  # somebody uses it, it is another user's, or was removed meanwhile
            age_seconds = time.time() - folder.stat().st_mtime
            if age_seconds > (VALID_DAYS + CLOCKS_DAYS) * 86400:
                shutil.rmtree(folder)
            elif age_seconds > ORPHAN_SECONDS and folder.name.startswith(prefix_of("keys")):
                # Open for writing, as NFS locks nothing else; of another host it may not tell who has a lock.
                with (folder / LOCK_FILE).open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


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
