"""Drop-in replacements for reversible nets of other packages: the same names, arguments, equations and checkpoints.

One file for each; none of them needs the original package, and `import retrograde` loads none of them.
"""
