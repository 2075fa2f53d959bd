"""The files transport passes its suite, leaves no files behind, and names damaged files and tensors."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path

import pytest
import torch

from rl_core.errors import ConfigError, DeadlineError, WeightSyncError
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_core.testing.transports import WeightTransportConformance
from rl_rollout.transports import files as files_module
from rl_rollout.transports.files import FilesReceiver, FilesTransport, files


class TestFiles(WeightTransportConformance):
    transport = files

    def damage(self, rendezvous):
        path = next(path for path in bucket_paths(rendezvous) if path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        return True


class TestFilesInOneDirectory(WeightTransportConformance):
    transport = FilesTransport(directory=tempfile.gettempdir())

    def damage(self, rendezvous):
        max(bucket_paths(rendezvous), key=lambda path: path.stat().st_size).unlink()
        return True


def bucket_paths(rendezvous):
    return sorted(path for folder in rendezvous.data["directories"] for path in Path(folder).glob("*.bucket"))


@pytest.fixture
def sync():
    transport = FilesTransport(timeout_s=0.2)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    yield transport, rendezvous
    transport.close(rendezvous)


def send(transport, rendezvous, version=0):
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    return transport.sender(rendezvous, 0, 1).send(pack_buckets(weights.items(), 1 << 20), version)


def test_a_cut_off_file_is_named_with_both_sizes(sync):
    send(*sync)
    (path,) = bucket_paths(sync[1])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WeightSyncError, match=r"rank0_0\.bucket has 37 bytes, expected 40"):
        list(FilesReceiver(sync[1]).receive(0))


def test_a_changed_byte_names_the_tensor(sync):
    send(*sync)
    (path,) = bucket_paths(sync[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(WeightSyncError, match="is damaged: b differ"):
        list(FilesReceiver(sync[1]).receive(0))


def test_swapped_shapes_are_noticed(sync):
    send(*sync)
    manifest = Path(sync[1].data["directories"][0]) / "rank0.json"
    content = json.loads(manifest.read_text())
    bucket = content["buckets"][0]
    bucket["tensors"] = [
        ["a", "float32", [2, 2], bucket["tensors"][0][3]],
        ["b", "float32", [6], bucket["tensors"][1][3]],
    ]
    manifest.write_text(json.dumps(content))
    with pytest.raises(WeightSyncError, match="is damaged"):
        list(FilesReceiver(sync[1]).receive(0))


def test_receiving_from_a_rank_that_never_sends_ends_at_the_deadline(sync):
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for ranks \[0\] of 1"):
        list(FilesReceiver(sync[1]).receive(0))


def test_a_sync_leaves_no_files_and_only_the_owner_may_read_them(sync):
    transport, rendezvous = sync
    send(transport, rendezvous)
    folders = [Path(folder) for folder in rendezvous.data["directories"]]
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in folders)
    transport.close(rendezvous)
    assert not any(folder.exists() for folder in folders)


def test_a_directory_that_does_not_exist_is_refused_before_a_run(tmp_path):
    FilesTransport(directory=str(tmp_path)).validate()
    missing = FilesTransport(directory=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"weight_sync_backend: the directory of files is .*nowhere, .*; create it"):
        missing.validate()


def test_a_world_of_another_size_is_refused(sync):
    with pytest.raises(WeightSyncError, match="opened for 1 ranks, not 2"):
        sync[0].sender(sync[1], 0, 2)


def test_a_rank_that_cannot_write_raises_an_error(sync):
    transport, rendezvous = sync
    transport.close(rendezvous)
    with pytest.raises(WeightSyncError, match="rank 0 could not write weight version 0"):
        send(transport, rendezvous)


def test_a_bucket_goes_to_disk_if_other_ranks_fill_the_memory_first(sync, monkeypatch):
    """Every rank may see free memory at the same time, although there is room for only one of their buckets."""
    transport, rendezvous = sync
    disk, memory = map(Path, rendezvous.data["directories"])

    def write(path, bucket):
        if path.parent == memory:
            path.write_bytes(b"the beginning")
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, bucket)

    written = files_module._write_bucket
    monkeypatch.setattr(files_module, "_write_bucket", write)
    manifest = send(transport, rendezvous)
    assert [path.parent for path in bucket_paths(rendezvous)] == [disk]
    received = {
        name: tensor for bucket in FilesReceiver(rendezvous).receive(0) for name, tensor in unpack_bucket(bucket)
    }
    assert received.keys() == manifest.tensors.keys()


def test_reading_a_manifest_ends_with_an_error_of_the_sync_if_the_sync_is_closed(sync, monkeypatch):
    transport, rendezvous = sync
    send(transport, rendezvous)
    exists = Path.exists

    def exists_until_now(path):
        found = exists(path)
        transport.close(rendezvous)
        return found

    monkeypatch.setattr(Path, "exists", exists_until_now)
    with pytest.raises(WeightSyncError, match=r"the sync was closed while rank0\.json was read"):
        list(FilesReceiver(rendezvous).receive(0))
