import json

import pytest

from nanoflow_jax.runtime.kv_store.bench import main


def test_bench_prints_a_table_and_json(tmp_path, capsys):
    main(["--directory", str(tmp_path), "--page-kib", "4", "--pages", "64", "--repeat", "1", "--readers", "2"])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["pages"] == 64 and len(report["gb_per_s"]) == 9
    assert all(rate > 0 for rate in report["gb_per_s"].values())
    assert [line.split("  ")[0] for line in lines[2:-2]] == [
        "host put",
        "host get",
        "ssd put",
        "ssd get, cold",
        "ssd get, warm",
    ]
    assert lines[-2].startswith("microseconds of calls per page: reserve, commit ")
    assert not list(tmp_path.iterdir())


def test_bench_refuses_senseless_sizes(capsys):
    with pytest.raises(SystemExit):
        main(["--pages", "0"])
    assert "--pages 0 must be at least 1" in capsys.readouterr().err
