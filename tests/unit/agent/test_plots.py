from pathlib import Path

import pytest

from tests import plots


@pytest.mark.parametrize("what", sorted(plots.PLOTS))
def test_plot_is_drawn(what, tmp_path, capsys):
    plots.main([what, "--out", str(tmp_path)])
    image = Path(capsys.readouterr().out.strip())
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
