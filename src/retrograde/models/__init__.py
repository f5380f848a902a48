"""Small real models, one file each. Not loaded by `import retrograde`."""
