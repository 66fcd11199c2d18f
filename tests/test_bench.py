"""Recorded results: what is read back, and that every CSV in the repository can be read and says where it is from."""

import pytest

from flashlib import bench

FILES = sorted(bench.RESULTS.glob("*/*.csv"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "speed.csv").write_text(
        "pass,head_dim,ms_p50,tflops,gpu,torch,date\nfwd,128,1.50,,NVIDIA H200,2.11.0,2026\n", encoding="utf-8"
    )
    return tmp_path


def test_numbers_are_numbers_and_names_are_text(results):
    assert bench.read_results("speed") == [
        {
            "pass": "fwd",
            "head_dim": 128,
            "ms_p50": 1.5,
            "tflops": None,
            "gpu": "NVIDIA H200",
            "torch": "2.11.0",
            "date": "2026",
        }
    ]


@pytest.mark.parametrize(("subject", "gpu"), [("none", "h200"), ("speed", "a100"), ("", "h200")])
def test_unknown_result_is_refused_and_the_known_are_listed(results, subject, gpu):
    with pytest.raises(ValueError, match=rf"subject must .*\['h200/speed'\]\), got {gpu}/{subject}"):
        bench.read_results(subject, gpu)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_file_is_read_and_names_its_machine(path):
    rows = bench.read_results(path.stem, path.parent.name)
    assert rows
    for row in rows:
        assert None not in row, "a row has more fields than the header"
        assert row["gpu"]
        assert row["torch"]
        # A chapter may be drafted with invented numbers; they must not be committed.
        assert "fake" not in str(row).lower()
