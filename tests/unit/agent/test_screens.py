"""Pictures by a browser that stands still, gives up or is not ready with drawing when it is asked."""

import pytest

from tests import screens

WHOLE, HALF = "whole" * 4000, "half" * 4000
FAKE = """#!/bin/sh
for one in "$@"; do case "$one" in --screenshot=*) target="${one#--screenshot=}";; esac; done
run=$(cat @FOLDER@/runs 2>/dev/null | wc -l)
echo >> @FOLDER@/runs
case $run in
@CASES@
esac
"""


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """Makes a browser that does one thing after the other, the last of them for ever."""
    (tmp_path / "whole").write_text(WHOLE)
    (tmp_path / "half").write_text(HALF)
    (tmp_path / "blank").write_text("white")
    does = {name: f'cp {tmp_path}/{name} "$target"' for name in ("whole", "half", "blank")}
    does |= {"hangs": "sleep 60 & wait", "crashes": "exit 1"}

    def make(*steps):
        cases = [f"{place}) {does[step]};;" for place, step in enumerate(steps)]
        script = tmp_path / "browser"
        cases.append(f"*) {does[steps[-1]]};;")
        script.write_text(FAKE.replace("@FOLDER@", str(tmp_path)).replace("@CASES@", "\n".join(cases)))
        script.chmod(0o755)
        monkeypatch.setattr(screens, "BROWSER", str(script))
        monkeypatch.setattr(screens, "PATIENCE_SECONDS", 1.0)

    return make


@pytest.mark.parametrize(
    "steps",
    [("whole",), ("half", "whole"), ("blank", "whole"), ("whole", "half", "whole"), ("crashes", "whole"),
     ("hangs", "whole"), ("whole", "hangs", "crashes", "whole")],
)  # fmt: skip
def test_the_picture_is_one_that_stays(browser, tmp_path, steps):
    browser(*steps)
    assert screens.picture(tmp_path / "page.html", tmp_path / "page.png", "100,100") == WHOLE.encode()


@pytest.mark.parametrize(("steps", "said"), [(("blank",), "draws nothing"), (("crashes",), "draws nothing"),
                                             (("half", "whole") * 3, "no two pictures")])  # fmt: skip
def test_a_page_that_is_never_drawn_is_told(browser, tmp_path, steps, said):
    browser(*steps)
    with pytest.raises(AssertionError, match=said):
        screens.picture(tmp_path / "page.html", tmp_path / "page.png", "100,100")
