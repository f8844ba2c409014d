"""Draws the pictures of docs/performance.md and of the README from raw measurements.

python scripts/performance_pictures.py      # docs/performance/speed.svg and docs/performance/*/roofline.png
"""

from __future__ import annotations

from pathlib import Path

from performance_tables import FOLDERS, MACHINES, beside, load, weights


def roofline(folder: Path, path: Path) -> bool:
    """Draws what was reached under the roof that memory and multiplying units are; False without data."""
    decode, prompts = load(folder, "decode") + load(folder, "sparse"), load(folder, "prompt")
    peaks = load(folder, "peak")
    if not decode or not prompts:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    rate = max(row["ceiling_gb_s"] for row in decode)
    x = (0.5, 30000.0)
    top = max([row["gflop_per_s"] for row in prompts])
    axes.plot(x, [rate * v for v in x], color="black", lw=1.5)
    axes.annotate(f"memory, {rate:.0f} GB/s", (5, 5 * rate * 1.5), rotation=40, fontsize=9)
    for name, value in (peaks[0] if peaks else {}).items():
        if name != "threads":
            axes.plot([value / rate, x[1]], [value, value], color="gray", lw=1)
            axes.annotate(
                f"{name.replace('_', ' ')}, {value} GFLOP/s", (x[1], value * 1.08), ha="right", fontsize=8
            )
            top = max(top, value)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(weights(row) for row in decode))}
    markers = {"dense": "o", "exact": "^", "predicted": "s"}
    seen = set()
    for row in decode:
        # Sparse steps do as many operations for a byte as dense ones: two for each weight.
        dense = next(r for r in decode if weights(r) == weights(row) and r["sparsity"] == "dense")
        flop = 2 * (dense["n_parameters"] - dense["n_vocab"] * dense["n_embd"])
        intensity = flop / dense["bytes_per_token"]
        label = f"decode, {row['sparsity']}"
        axes.plot(
            intensity,
            intensity * row["read_gb_s"],
            markers[row["sparsity"]],
            color=colours[weights(row)],
            label=None if label in seen else label,
        )
        seen.add(label)
    for row in prompts:
        intensity = row["gflop_per_s"] / (row["tokens_per_s"] * row["bytes_per_token"] / 1e9)
        label = f"prompt, {weights(row)}"
        axes.plot(
            intensity,
            row["gflop_per_s"],
            "*",
            ms=10,
            color=colours[weights(row)],
            label=None if label in seen else label,
        )
        seen.add(label)
    axes.set(xscale="log", yscale="log", xlim=x, ylim=(rate * 0.4, top * 2))
    axes.set(xlabel="operations for each byte that is read", ylabel="GFLOP/s")
    axes.set_title(f"{decode[0]['cpu']}, {decode[0]['threads']} threads", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
    return True


def speed_picture(folders: Path, path: Path) -> None:
    """Tokens per second beside llama.cpp on the first machine, for the README."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine, title = next(iter(MACHINES.items()))
    found = beside(folders / machine, "tg")
    kinds = list(dict.fromkeys(kind for kind, mode in found if mode == "predicted"))
    modes = {"dense": "#b8c4ce", "exact": "#5b8db8", "predicted": "#c1440e"}
    with pyplot.rc_context({"svg.hashsalt": "powerinfer", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6.4, 2.6), layout="constrained")
        labels, at = [], 0.0
        for kind in kinds:
            bars = [(f"{kind}, llama.cpp", found[kind, "dense"][1], "#555555")]
            bars += [(f"{kind}, {mode}", found[kind, mode][0], colour) for mode, colour in modes.items()]
            for label, value, colour in bars:
                axes.barh(at, value, color=colour)
                axes.annotate(f" {value:.0f}", (value, at), va="center")
                labels.append((at, label))
                at += 1
            at += 0.6
        axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
        axes.invert_yaxis()
        axes.set(xlabel="tokens per second, one conversation")
        axes.set_title(
            f"ReLU model, 10 % of its neurons active, 8 layers of Llama 2 7B's width; {title}", fontsize=9
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    speed_picture(FOLDERS, FOLDERS / "speed.svg")
    for folder in sorted(path for path in FOLDERS.iterdir() if path.is_dir()):
        roofline(folder, folder / "roofline.png")


if __name__ == "__main__":
    main()
