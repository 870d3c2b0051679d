"""All of attnforge in one notebook: `marimo edit examples/notebook.py`; `python examples/notebook.py` runs it through.

Needs attnforge[docs,report].
"""

import marimo

app = marimo.App(app_title="attnforge")


@app.cell
def _():
    import marimo as mo
    import torch

    import attnforge as af

    mo.md("# Functions as attention\n\nMove a slider, and everything below it is computed again.")
    return af, mo, torch


@app.cell
def _(mo):
    formula = mo.ui.text("sin(x*y) + exp(-x**2)/y", label="formula of x in [-1, 1] and y in [0.5, 2]", full_width=True)
    digits = mo.ui.slider(1, 4, value=3, label="error at most 10 to the power of minus")
    mo.vstack([formula, digits])
    return digits, formula


@app.cell
def _(af, digits, formula, mo):
    net = af.compile(formula.value, af.Box(x=(-1, 1), y=(0.5, 2)), eps=10.0**-digits.value)
    mo.md(
        f"**{net.size.layers} layers, {net.size.heads} heads**, off by at most **{net.bound:.3g}** in all of the box, "
        f"in {net.certificate.dtype}, rounding included: *{net.certificate.kind}*.\n\n```text\n{net.explain()}\n```"
    )
    return (net,)


@app.cell
def _(mo, net):
    mo.vstack([mo.md("## Function and network along lines through the box"), net.plot()])
    return


@app.cell
def _(af, mo, net):
    plain = af.export.to_plain(net)
    heads = [{"layer": i, "head": j, "computes": head.purpose or "carries columns on"}
             for i, layer in enumerate(plain.heads) for j, head in enumerate(layer)]  # fmt: skip
    mo.vstack([mo.md("## The same as a stock transformer, every head by its purpose"), mo.ui.table(heads)])
    return (heads,)


@app.cell
def _(af, mo):
    from attnforge.rasp import Sequences, library

    reverse = af.compile(library.reverse(), Sequences("abcd", max_length=20))
    word = mo.ui.text("abcd", label="a word of a, b, c, d")
    mo.vstack([mo.md("## A token program, exact on every sequence of up to 20 tokens"), word])
    return reverse, word


@app.cell
def _(mo, reverse, word):
    answer = "".join(reverse(word.value))
    mo.md(f"`{word.value}` becomes `{answer}`; the certificate says *{reverse.certificate.kind}*.")
    return (answer,)


@app.cell
def _(af, mo, torch):
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    _, report = af.convert(mlp, torch.randn(64, 3), level="pure")
    mo.md(f"## A model, its activations as attention\n\nOutputs move by {report.worst:.2g}: *measured*, on 64 inputs.")
    return (report,)


@app.cell
def _(af, mo, net, torch):
    broken = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), eps=1e-4)
    before = broken.bound
    with torch.no_grad():
        next(broken.network.parameters()).mul_(1.001)
    after = af.certify(broken).bound
    mo.md(
        f"## Break it\n\nWeights of another network were changed by a thousandth. Its bound, {before:.2g}, is void; "
        f"what can be proved now is {after:.2g}. The network above still has {net.bound:.2g}."
    )
    return after, before


if __name__ == "__main__":
    app.run()
