"""The converted model of SmolLM2 is made once, whoever asks for it at the same time."""

import subprocess
import sys

CONVERT = """
import sys, time
from sage_lib.policy import smollm

def fake(folder):
    with open(sys.argv[1], "a") as file:
        file.write("made\\n")
    time.sleep(0.5)
    folder.mkdir(parents=True)
    (folder / "whole").touch()

smollm._convert = fake
print(smollm.convert())
"""


def test_two_at_once_convert_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    words = [sys.executable, "-c", CONVERT, str(tmp_path / "log")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=300)[0].strip() for process in both}
    assert told == {str(tmp_path / "models" / "smollm2-135m")}
    assert (tmp_path / "log").read_text() == "made\n"
