"""More than a hundred formulas that people type first: how many compile, in both dtypes, and why the others do not.

python benchmarks/textbook.py             compiles all of them, prints a table and what is refused, writes
                                          benchmarks/results/textbook.json
python benchmarks/textbook.py --add       formulas that were not recorded yet; their rows are added to the others
python benchmarks/textbook.py --quick     every eighth formula; nothing is written
python benchmarks/textbook.py chirp ...   only formulas whose name has one of the words in it; nothing is written

The goals are 0.001 of the formula's range in float32 and 0.000001 in float64. Formulas are grouped: elementary
functions, signals, kinks, roots, powers, physics, statistics. Every network is compared with sympy's reading of the
formula at random points, corners and edges, evaluated by numpy in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from compile import GOALS, edges, errors, spread, truth_of  # noqa: E402

import attnforge as af  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "textbook.json"
POINTS = 40_000
Interval = tuple[float, float]


def _sines(*frequencies: float) -> str:
    """A sum of sines of 2 pi t, each of smaller amplitude than the one before."""
    return " + ".join(f"sin(2*pi*{f}*t)/{k}" for k, f in enumerate(frequencies, 1))


#: name -> (formula, box); the group is the name's first word.
FORMULAS: dict[str, tuple[str, dict[str, Interval]]] = {
    "elementary exponential": ("exp(-x)", {"x": (0, 10)}),
    "elementary logarithm": ("log(x)", {"x": (0.001, 10)}),
    "elementary tangent": ("tan(x)", {"x": (-1.4, 1.4)}),
    "elementary arcs": ("asin(x) + acos(x)*x", {"x": (-1, 1)}),
    "elementary hyperbolic": ("sinh(x)/cosh(x)**2", {"x": (-5, 5)}),
    "elementary power tower": ("x**x", {"x": (0.1, 3)}),
    "elementary rational": ("(x**3 - 2*x + 1)/(x**2 + 1)", {"x": (-4, 4)}),
    "elementary runge": ("1/(1 + 25*x**2)", {"x": (-1, 1)}),
    "elementary polynomial": ("x**5 - 5*x**3 + 4*x", {"x": (-2.2, 2.2)}),
    "elementary chebyshev": ("cos(12*acos(x))", {"x": (-1, 1)}),
    "elementary witch": ("8/(x**2 + 4)", {"x": (-10, 10)}),
    "elementary logistic": ("1/(1 + exp(-5*x))", {"x": (-4, 4)}),
    "elementary softplus": ("log(1 + exp(x))", {"x": (-10, 10)}),
    "elementary sinc": ("sin(x)/x", {"x": (-20, 20)}),
    "elementary bump": ("exp(-1/(1 - x**2))", {"x": (-0.95, 0.95)}),
    "elementary reciprocal": ("1/x", {"x": (0.01, 1)}),
    "signal thirty": ("sin(x)", {"x": (-30, 30)}),
    "signal hundred": ("sin(x)", {"x": (-100, 100)}),
    "signal three hundred": ("cos(x)", {"x": (0, 300)}),
    "signal ten periods": ("sin(2*pi*x)", {"x": (0, 10)}),
    "signal fifty periods": ("sin(2*pi*t)", {"t": (0, 50)}),
    "signal fast": ("sin(30*x)", {"x": (-1, 1)}),
    "signal wave packet": ("cos(20*x)*exp(-x**2)", {"x": (-3, 3)}),
    "signal topologist": ("sin(1/x)", {"x": (0.02, 1)}),
    "signal ten sines": (_sines(1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5), {"t": (0, 10)}),
    "signal ten sines over fifty periods": (_sines(5, 9, 14, 18, 23, 29, 33, 38, 44, 50), {"t": (0, 1)}),
    "signal square wave": (" + ".join(f"sin({k}*t)/{k}" for k in range(1, 20, 2)), {"t": (-6.5, 6.5)}),
    "signal sawtooth": (" + ".join(f"sin({k}*t)/{k}" for k in range(1, 11)), {"t": (-6.5, 6.5)}),
    "signal linear chirp": ("sin(2*pi*(t + 4*t**2))", {"t": (0, 3)}),
    "signal exponential chirp": ("sin(10*exp(t))", {"t": (0, 2)}),
    "signal damped": ("exp(-t/5)*cos(2*pi*t)", {"t": (0, 20)}),
    "signal two damped": ("exp(-t/5)*cos(2*pi*t) + exp(-t/2)*sin(7*t)", {"t": (0, 15)}),
    "signal damped family": ("exp(-b*t)*cos(w*t)", {"b": (0.1, 1), "t": (0, 10), "w": (1, 5)}),
    "signal modulated": ("(1 + cos(2*pi*t)/2)*sin(20*pi*t)", {"t": (0, 2)}),
    "signal frequency modulated": ("sin(20*t + 5*sin(2*t))", {"t": (0, 6)}),
    "signal beats": ("sin(10*t) + sin(11*t)", {"t": (0, 13)}),
    "signal lissajous": ("sin(3*s)*cos(4*t)", {"s": (0, 6.3), "t": (0, 6.3)}),
    "signal plane wave": ("cos(5*x + 7*y - 3*t)", {"x": (-2, 2), "y": (-2, 2), "t": (0, 4)}),
    "signal standing wave": ("sin(6*x)*cos(9*t)", {"x": (0, 3.2), "t": (0, 3.2)}),
    "signal ripples": ("cos(8*sqrt(x**2 + y**2 + 0.1))", {"x": (-2, 2), "y": (-2, 2)}),
    "signal gabor": ("exp(-x**2 - y**2)*cos(10*x)", {"x": (-2, 2), "y": (-2, 2)}),
    "signal squared": ("sin(5*x)**2 + cos(3*x)**3", {"x": (-3, 3)}),
    "signal sine integral kernel": ("sin(40*x)/(x + 2)", {"x": (-1, 1)}),
    "signal nested": ("sin(3*sin(4*x))", {"x": (-3, 3)}),
    "kink absolute": ("abs(x)", {"x": (-1, 1)}),
    "kink signed square": ("x*abs(x)", {"x": (-2, 2)}),
    "kink wave": ("sin(x) + abs(x)", {"x": (-3, 3)}),
    "kink rectified": ("abs(sin(3*x))", {"x": (-2, 2)}),
    "kink half wave": ("max(sin(5*t), 0)", {"t": (0, 6)}),
    "kink root": ("sqrt(abs(x))", {"x": (-1, 1)}),
    "kink distance power": ("abs(x - y)**1.5", {"x": (-1, 1), "y": (-1, 1)}),
    "kink hat": ("max(1 - abs(x), 0)", {"x": (-2, 2)}),
    "kink clipped": ("clip(x**3, -1, 1)", {"x": (-2, 2)}),
    "kink median": ("max(min(x, y), min(max(x, y), z))", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "kink payoff": ("max(s*exp(r) - k, 0)", {"s": (0.5, 1.5), "r": (0, 0.2), "k": (0.8, 1.2)}),
    "kink huber": ("min(x**2/2, abs(x) - 0.5)", {"x": (-0.9, 0.9)}),
    "kink soft threshold": ("max(x - 0.3, 0) - max(-x - 0.3, 0)", {"x": (-1, 1)}),
    "kink laplace": ("exp(-abs(x - m)/b)/(2*b)", {"x": (-3, 3), "m": (-1, 1), "b": (0.5, 2)}),
    "kink abs of product": ("abs(x*y - z)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "kink log": ("log(1 + abs(x))", {"x": (-5, 5)}),
    "kink manhattan": ("abs(x) + abs(y) + abs(z)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "kink chebyshev norm": ("max(abs(x), abs(y), abs(z))", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "root norm": ("sqrt(x**2 + y**2)", {"x": (-1, 1), "y": (-1, 1)}),
    "root of three": ("sqrt(x**2 + y**2 + z**2)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "root semicircle": ("sqrt(1 - x**2)", {"x": (-1, 1)}),
    "root cosine law": ("sqrt(x1**2 - 2*x1*x2*cos(t1 - t2) + x2**2)", {n: (1, 5) for n in ("x1", "x2", "t1", "t2")}),
    "root guided wave": ("sqrt(-pi**2/d**2 + w**2/c**2)", {"w": (4, 6), "c": (1, 2), "d": (2, 4)}),
    "root guided wave near cutoff": ("sqrt(-pi**2/d**2 + w**2/c**2)", {"w": (2, 4), "c": (1, 1.27), "d": (2, 4)}),
    "root charged energy": (
        "V*q + sqrt(c**4*m**2 + c**2*(p - A*q)**2)", {n: (1, 5) for n in ("V", "q", "c", "m", "p", "A")}),
    "root cube": ("x**(1/3)", {"x": (0, 8)}),
    "root geometric mean": ("sqrt(x*y)", {"x": (0, 1), "y": (0, 1)}),
    "root quadratic": ("(-b + sqrt(b**2 - 4*c))/2", {"b": (3, 6), "c": (-1, 2)}),
    "root heron": (
        "sqrt((a + b + c)*(-a + b + c)*(a - b + c)*(a + b - c))/4", {"a": (3, 4), "b": (3, 4), "c": (3, 4)}),
    "root standard deviation": (
        "sqrt(((x - (x+y+z)/3)**2 + (y - (x+y+z)/3)**2 + (z - (x+y+z)/3)**2)/3)",
        {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "root harmonic": ("2*x*y/(x + y)", {"x": (0.1, 1), "y": (0.1, 1)}),
    "root of cubes": ("(abs(x)**3 + abs(y)**3)**(1/3)", {"x": (-1, 1), "y": (-1, 1)}),
    "root difference": ("sqrt(x + 1) - sqrt(x)", {"x": (0, 10)}),
    "root ellipse": ("sqrt(1 - x**2/4)*3", {"x": (-2, 2)}),
    "root relativistic energy": ("sqrt(p**2 + m**2)", {"p": (-5, 5), "m": (0, 1)}),
    "physics kepler": ("a*(1 - e**2)/(1 + e*cos(f))", {"a": (1, 2), "e": (0, 0.8), "f": (0, 6.3)}),
    "physics gamma factor": ("1/sqrt(1 - v**2)", {"v": (0, 0.99)}),
    "physics planck": ("x**3/(exp(x) - 1)", {"x": (0.1, 20)}),
    "physics fermi": ("1/(exp((e - m)/t) + 1)", {"e": (0, 2), "m": (0.5, 1.5), "t": (0.05, 0.5)}),
    "physics lennard-jones": ("4*((1/r)**12 - (1/r)**6)", {"r": (0.9, 3)}),
    "physics yukawa": ("exp(-m*r)/r", {"m": (0.5, 2), "r": (0.2, 5)}),
    "physics breit-wigner": ("g**2/((e - m)**2 + g**2)", {"e": (-5, 5), "m": (-1, 1), "g": (0.2, 1)}),
    "physics airy disc": ("(sin(x)/x)**2", {"x": (-30, 30)}),
    "physics grating": ("(sin(8*x)/sin(x))**2/64", {"x": (0.1, 3)}),
    "physics two body": ("1/sqrt((x - 1)**2 + y**2 + 0.01) + 1/sqrt((x + 1)**2 + y**2 + 0.01)",
                         {"x": (-2, 2), "y": (-2, 2)}),
    "physics projectile": ("x*tan(a) - 9.81*x**2/(2*v**2*cos(a)**2)", {"x": (0, 10), "a": (0.1, 1.3), "v": (5, 20)}),
    "physics doppler": ("f*(343 + u)/(343 - v)", {"f": (100, 1000), "u": (-30, 30), "v": (-30, 30)}),
    "physics resonance": ("1/sqrt((1 - w**2)**2 + (0.1*w)**2)", {"w": (0, 3)}),
    "physics rc": ("V*(1 - exp(-t/(R*C)))", {"V": (1, 10), "t": (0, 10), "R": (1, 5), "C": (0.5, 2)}),
    "physics pendulum energy": ("w**2/2 - cos(q)", {"w": (-3, 3), "q": (-6.3, 6.3)}),
    "physics hodgkin-huxley rate": ("0.1*(v + 40)/(1 - exp(-(v + 40)/10))", {"v": (-100, 50)}),
    "physics langevin": ("1/tanh(x) - 1/x", {"x": (-10, 10)}),
    "physics escape velocity": ("sqrt(2*6.674e-11*M/r)", {"M": (1e24, 1e25), "r": (1e6, 1e7)}),
    "physics haversine": (
        "2*asin(sqrt(sin((p2 - p1)/2)**2 + cos(p1)*cos(p2)*sin((l2 - l1)/2)**2))",
        {"p1": (0, 0.5), "p2": (0.6, 1), "l1": (0, 0.5), "l2": (0.6, 1)}),
    "statistics normal": ("exp(-(x - m)**2/(2*s**2))/(s*sqrt(2*pi))", {"x": (-4, 4), "m": (-1, 1), "s": (0.5, 2)}),
    "statistics entropy": ("-p*log(p) - (1 - p)*log(1 - p)", {"p": (0.01, 0.99)}),
    "statistics cauchy": ("1/(pi*s*(1 + ((x - m)/s)**2))", {"x": (-5, 5), "m": (-1, 1), "s": (0.5, 2)}),
    "statistics correlation": (
        "(x*u + y*v)/sqrt((x**2 + y**2)*(u**2 + v**2))", {n: (0.2, 1) for n in ("x", "y", "u", "v")}),
    "statistics softmax": ("exp(x)/(exp(x) + exp(y) + exp(z))", {"x": (-3, 3), "y": (-3, 3), "z": (-3, 3)}),
    "statistics log sum": ("log(exp(x) + exp(y))", {"x": (-5, 5), "y": (-5, 5)}),
    "statistics rosenbrock": ("(1 - x)**2 + 100*(y - x**2)**2", {"x": (-2, 2), "y": (-1, 3)}),
    "statistics rastrigin": ("20 + x**2 + y**2 - 10*cos(2*pi*x) - 10*cos(2*pi*y)", {"x": (-5, 5), "y": (-5, 5)}),
    "statistics ackley": (
        "-20*exp(-0.2*sqrt((x**2 + y**2)/2)) - exp((cos(2*pi*x) + cos(2*pi*y))/2)", {"x": (-4, 4), "y": (-4, 4)}),
    "statistics himmelblau": ("(x**2 + y - 11)**2 + (x + y**2 - 7)**2", {"x": (-5, 5), "y": (-5, 5)}),
    "statistics gaussian mixture": ("exp(-(x - 2)**2)/3 + 2*exp(-(x + 2)**2/2)/3", {"x": (-6, 6)}),
    "statistics portfolio volatility": (
        "sqrt(w**2*a**2 + (1 - w)**2*b**2 + 2*w*(1 - w)*a*b*r)",
        {"w": (0, 1), "a": (0.1, 0.4), "b": (0.1, 0.4), "r": (-0.9, 0.9)}),
    "statistics bivariate normal": (
        "exp(-(x**2 - 2*r*x*y + y**2)/(2*(1 - r**2)))/(2*pi*sqrt(1 - r**2))",
        {"x": (-3, 3), "y": (-3, 3), "r": (-0.8, 0.8)}),
    "statistics compound interest": ("(1 + r/n)**(n*t)", {"r": (0.01, 0.1), "n": (1, 12), "t": (1, 30)}),
    "statistics hill": ("x**4/(K**4 + x**4)", {"x": (0, 10), "K": (1, 5)}),
    "statistics inhibited growth": (
        "m*S/(K + S + S**2/I)", {"m": (0.1, 1), "S": (0, 10), "K": (0.1, 1), "I": (1, 10)}),
    "statistics discount": ("c*(1 - (1 + r)**(-10))/r", {"c": (1, 10), "r": (0.01, 0.2)}),
    "physics planck at a temperature": ("x**3/(exp(x/T) - 1)", {"x": (0.05, 15), "T": (0.5, 3)}),
    "physics maxwell speeds": ("sqrt(2/pi)*x**2*exp(-x**2/(2*a**2))/a**3", {"x": (0, 6), "a": (0.5, 2)}),
    "physics driven oscillator": (
        "F/sqrt((k - m*w**2)**2 + (c*w)**2)",
        {"F": (0.5, 2), "k": (5, 10), "m": (0.5, 2), "w": (0, 5), "c": (0.3, 1)}),
    "physics fabry-perot": ("1/(1 + F*sin(d/2)**2)", {"F": (1, 50), "d": (0, 12)}),
    "physics soliton": ("c/2/cosh(sqrt(c)/2*(x - c*t))**2", {"c": (0.2, 4), "x": (-5, 5), "t": (0, 2)}),
    "physics rlc impedance": (
        "sqrt(R**2 + (w*L - 1/(w*C))**2)", {"R": (1, 100), "w": (100, 1000), "L": (0.01, 0.1), "C": (1e-5, 1e-4)}),
    "physics stefan-boltzmann": (
        "5.67e-8*e*A*(T**4 - S**4)", {"e": (0.1, 1), "A": (0.1, 2), "T": (250, 1000), "S": (200, 350)}),
    "physics rabi": ("W**2/(W**2 + D**2)*sin(sqrt(W**2 + D**2)*t/2)**2", {"W": (0.1, 2), "D": (-2, 2), "t": (0, 10)}),
    "physics manning": (
        "(1/n)*A*(A/P)**(2/3)*sqrt(S)", {"n": (0.01, 0.05), "A": (0.5, 10), "P": (1, 20), "S": (0.0001, 0.01)}),
    "physics acidity": ("-log10(sqrt(Ka*C))", {"Ka": (1e-10, 1e-3), "C": (1e-4, 1)}),
    "root horizon": ("sqrt(1 - 2/r)", {"r": (2, 20)}),
    "root plasma": ("sqrt(1 - p**2/w**2)", {"p": (0, 1), "w": (1, 5)}),
    "root prandtl-meyer": ("sqrt(6)*atan(sqrt((M**2 - 1)/6)) - atan(sqrt(M**2 - 1))", {"M": (1, 5)}),
    "root tunnel": ("exp(-2*d*sqrt(2*m*(V - E)))", {"d": (0.1, 2), "m": (0.5, 1), "V": (2, 4), "E": (0, 2)}),
    "root invariant mass": (
        "sqrt(2*p1*p2*(cosh(e1 - e2) - cos(f1 - f2)))",
        {"p1": (10, 100), "p2": (10, 100), "e1": (-2, 2), "e2": (-2, 2), "f1": (-3, 3), "f2": (-3, 3)}),
    "root superellipse": ("(abs(x)**2.5 + abs(y)**2.5)**(1/2.5)", {"x": (-1, 1), "y": (-1, 1)}),
    "root superellipse of fourth powers": ("(x**4 + y**4)**(1/4)", {"x": (-1, 1), "y": (-1, 1)}),
    "statistics monod": ("mu*S/(Ks + S)", {"mu": (0.1, 2), "S": (0, 50), "Ks": (0.01, 5)}),
    "statistics receptor": ("L**2/(K**2 + L**2)", {"L": (0, 100), "K": (0.5, 10)}),
    "statistics competitive inhibition": (
        "V*S/(K*(1 + I/Ki) + S)", {"V": (0.5, 2), "S": (0, 20), "K": (0.1, 5), "I": (0, 10), "Ki": (0.5, 5)}),
    "statistics pareto": ("a*m**a/x**(a + 1)", {"a": (1, 3), "m": (0.5, 1), "x": (1, 10)}),
    "statistics weibull": (
        "k/l*(x/l)**(k - 1)*exp(-(x/l)**k)", {"k": (1.5, 3), "l": (0.5, 2), "x": (0.01, 4)}),
    "statistics three-way softmax": (
        "1/(1 + exp((b - a)/T) + exp((c - a)/T))", {"a": (-2, 2), "b": (-2, 2), "c": (-2, 2), "T": (0.2, 2)}),
    "statistics black-scholes argument": (
        "(log(S/K) + (r + s**2/2)*T)/(s*sqrt(T))",
        {"S": (50, 150), "K": (80, 120), "r": (0, 0.05), "s": (0.1, 0.5), "T": (0.1, 2)}),
    "statistics annuity": ("P*r/(1 - (1 + r)**(-n))", {"P": (1e5, 5e5), "r": (0.001, 0.01), "n": (60, 360)}),
    "statistics focal loss": ("-(1 - p)**g*log(p)", {"p": (0.05, 0.99), "g": (0, 4)}),
    "kink income tax": (
        "0.1*min(x, 10000) + 0.2*max(min(x, 40000) - 10000, 0) + 0.4*max(x - 40000, 0)", {"x": (0, 200000)}),
    "kink stribeck": ("(0.2 + 0.3*exp(-(v/0.1)**2))*tanh(50*v)", {"v": (-1, 1)}),
    "powers of variable exponent": ("x**y", {"x": (0, 2), "y": (0.5, 2)}),
    "powers of irrational exponent": ("x**sqrt(2)", {"x": (0, 3)}),
    "powers freundlich": ("k*C**n", {"k": (0.5, 3), "C": (0, 10), "n": (0.3, 0.9)}),
    "powers hill coefficient": ("x**n/(1 + x**n)", {"x": (0, 5), "n": (1, 4)}),
    "powers gamma density": ("x**(k - 1)*exp(-x)", {"x": (0, 10), "k": (2, 5)}),
    "powers beta density": ("x**(a - 1)*(1 - x)**(b - 1)", {"x": (0, 1), "a": (2, 4), "b": (2, 4)}),
    "powers kleiber": ("3.4*m**0.75", {"m": (0, 1000)}),
    "root sombrero": ("sin(sqrt(x**2 + y**2))/sqrt(x**2 + y**2)", {"x": (-8, 8), "y": (-8, 8)}),
    "root saturating force": (
        "x*tanh(sqrt(x**2 + y**2))/sqrt(x**2 + y**2)", {"x": (-2, 2), "y": (-2, 2)}),
    "root matern": ("(1 + sqrt(3)*sqrt(x**2 + y**2))*exp(-sqrt(3)*sqrt(x**2 + y**2))", {"x": (-2, 2), "y": (-2, 2)}),
    "root torus": ("sqrt((sqrt(x**2 + y**2) - 1)**2 + z**2) - 0.3", {"x": (-2, 2), "y": (-2, 2), "z": (-1, 1)}),
    "root von mises": ("sqrt(((a - b)**2 + (b - c)**2 + (c - a)**2)/2)", {"a": (-1, 1), "b": (-1, 1), "c": (-1, 1)}),
    "root quadratic binding": (
        "(P + L + K - sqrt((P + L + K)**2 - 4*P*L))/2", {"P": (0.1, 10), "L": (0.1, 10), "K": (0.1, 5)}),
    "signal quadratic chirp": ("sin(2*pi*(2*t + t**3/3))", {"t": (0, 4)}),
    "signal microseconds": ("sin(2*pi*1e6*t)", {"t": (0, 2e-5)}),
    "signal second order step": (
        "1 - exp(-z*t)*(cos(t*sqrt(1 - z**2)) + z/sqrt(1 - z**2)*sin(t*sqrt(1 - z**2)))",
        {"z": (0.05, 0.8), "t": (0, 12)}),
    "signal travelling packet": ("exp(-(x - 2*t)**2)*cos(10*(x - 2*t))", {"x": (-4, 4), "t": (0, 2)}),
    "physics fresnel reflection": (
        "((cos(q) - sqrt(n**2 - sin(q)**2))/(cos(q) + sqrt(n**2 - sin(q)**2)))**2", {"q": (0, 1.55), "n": (1.2, 2.5)}),
    "physics van der waals": (
        "8.314*T/(V - b) - a/V**2", {"T": (250, 400), "V": (0.001, 0.01), "b": (3e-5, 1e-4), "a": (0.1, 0.5)}),
    "physics compton": ("1/(1 + e*(1 - cos(q)))", {"e": (0.01, 10), "q": (0, 3.1416)}),
    "physics planck by wavelength": (
        "1.19e-16/l**5/(exp(0.01438777/(l*T)) - 1)", {"l": (3e-7, 3e-6), "T": (3000, 6000)}),
    "statistics arrhenius": ("A*exp(-E/(8.314*T))", {"A": (1e5, 1e8), "E": (2e4, 6e4), "T": (273, 500)}),
    "statistics t density": ("(1 + x**2/n)**(-(n + 1)/2)", {"x": (-5, 5), "n": (1, 10)}),
    "statistics entropy from zero": ("-p*log(p) - (1 - p)*log(1 - p)", {"p": (0, 1)}),
    "kink nested": ("min(max(x, y), max(y, z), max(x, z), 0.5)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}),
    "kink box distance": (
        "sqrt(max(abs(x) - 1, 0)**2 + max(abs(y) - 0.5, 0)**2) + min(max(abs(x) - 1, abs(y) - 0.5), 0)",
        {"x": (-2, 2), "y": (-2, 2)}),
    "kink smoothstep": ("clip(x, 0, 1)**2*(3 - 2*clip(x, 0, 1))", {"x": (-1, 2)}),
    "kink pinball": ("max(q*(y - f), (q - 1)*(y - f))", {"q": (0.05, 0.95), "y": (-1, 1), "f": (-1, 1)}),
}  # fmt: skip


def measured(name: str, goal: str) -> dict[str, Any]:
    """One formula in one dtype."""
    formula, sides = FORMULAS[name]
    box = af.Box(sides)
    truth = truth_of(formula, box.names or ())
    dtype, share = GOALS[goal]
    eps = share * spread(truth, box)
    row: dict[str, Any] = {"name": name, "formula": formula, "variables": box.dim, "eps": eps}
    start = time.process_time()  # of one thread: a busy machine makes no difference
    try:
        net = af.compile(formula, box, eps, dtype=dtype)
    except af.AttnforgeError as error:
        return {**row, "seconds": time.process_time() - start, "refused": str(error).splitlines()[0]}
    seconds = time.process_time() - start
    points = torch.cat([box.corners(4096, dtype), edges(box, POINTS // 3, dtype), box.sample(POINTS, 1, dtype)])
    found = errors(net, points, truth)
    size = net.size
    return {
        **row, "seconds": seconds, "bound": net.bound, "found": float(found.max()),
        "broken": int((found > net.bound).sum()), "layers": size.layers, "heads": size.heads, "anchors": size.anchors,
    }  # fmt: skip


def show(data: dict[str, list[dict[str, Any]]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    for goal, rows in data.items():
        table = Table("name", "formula", "s", "layers", "heads", "anchors", "bound/eps", "bound/found", title=goal)
        for row in rows:
            start = [row["name"], row["formula"][:40], f"{row['seconds']:.2f}"]
            if "refused" in row:
                table.add_row(*start, "", "", "", "refused", "")
                continue
            tight = f"{row['bound'] / row['found']:.1f}" if row["found"] else "exact"
            counts = (str(row[key]) for key in ("layers", "heads", "anchors"))
            table.add_row(*start, *counts, f"{row['bound'] / row['eps']:.2f}", tight)
        console.print(table)
    for goal, rows in data.items():
        done = [row for row in rows if "bound" in row]
        tight = statistics.median(row["bound"] / row["found"] for row in done if row["found"] > 0)
        seconds = statistics.median(row["seconds"] for row in rows)
        broken = sum(row["broken"] for row in done)
        console.print(
            f"{goal}: {len(done)} of {len(rows)} compile; median {seconds:.2f} s of CPU; "
            f"median bound / found {tight:.2f}; bounds broken: {broken}"
        )
        for row in rows:
            if "refused" in row:
                console.print(f"  refused: {row['name']}, eps = {row['eps']:.3g}: {row['refused']}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only formulas whose name has one of these words in it")
    parser.add_argument("--quick", action="store_true", help="every eighth formula; nothing is written")
    parser.add_argument("--add", action="store_true", help="formulas without a recorded row, which are added")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in FORMULAS if not wanted.words or any(word in name for word in wanted.words)]
    names = names[::8] if wanted.quick else names
    kept: dict[str, list[dict[str, Any]]] = {}
    if wanted.add:
        recorded = json.loads(RESULTS.read_text(encoding="utf-8"))
        kept = {goal: [row for row in recorded[goal] if row["name"] in FORMULAS] for goal in GOALS}
        names = [name for name in names if name not in {row["name"] for rows in kept.values() for row in rows}]
    data: dict[str, list[dict[str, Any]]] = {}
    for goal in GOALS:
        data[goal] = []
        for name in names:
            data[goal].append(measured(name, goal))
            refused = " refused" if "refused" in data[goal][-1] else ""
            sys.stderr.write(f"{goal} {len(data[goal])}/{len(names)} {name}{refused}\n")
    if wanted.add:
        order = list(FORMULAS)
        for goal, rows in data.items():
            rows[:] = sorted(kept[goal] + rows, key=lambda row: order.index(row["name"]))
    show(data)
    if len(names) == len(FORMULAS) or (wanted.add and not wanted.words and not wanted.quick):
        RESULTS.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
