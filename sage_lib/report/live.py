"""A curve below the cell that trains, drawn during training."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class LiveCurve(TrainerCallback):
    """Draws columns of a trainer's log, a panel each, and a bar with the step and the time left.

    A thin line has each logged row, a thick line the mean of the last ten. Outside a notebook
    nothing is drawn.

    Args:
        columns: names as the trainer logs them: "loss", "reward", "guide/mean".
        interval: logged rows between two drawings.
    """

    def __init__(self, *columns: str, interval: int = 5) -> None:
        self.columns, self.interval = columns, interval
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rows = []
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step")
        self.below = DisplayHandle()
        self._draw(self.below.display)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logged = {name: value for name, value in (logs or {}).items() if name in self.columns}
        if logged:
            self.bar.update(state.global_step - self.bar.n)
            self.rows.append({"step": state.global_step, **logged})
            if len(self.rows) % self.interval == 0:
                self._draw(self.below.update)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()
        self._draw(self.below.update)

    def _draw(self, show: Any) -> None:
        if get_ipython() is not None:
            figure = self.figure()
            show(figure)
            plt.close(figure)  # an open figure would be displayed again at the end of the cell

    def figure(self) -> Figure:
        """Return the curves so far."""
        width = 3 * len(self.columns)
        figure, axes = plt.subplots(
            1, len(self.columns), figsize=(width, 2), squeeze=False, layout="tight"
        )
        for axis, name in zip(axes[0], self.columns, strict=True):
            logged = pd.DataFrame(self.rows, columns=["step", name]).dropna()
            [line] = axis.plot(logged["step"], logged[name], linewidth=0.5)
            mean = logged[name].rolling(10, min_periods=1).mean()
            axis.plot(logged["step"], mean, color=line.get_color())
            axis.set(xlabel="step", ylabel=name)
        return figure
