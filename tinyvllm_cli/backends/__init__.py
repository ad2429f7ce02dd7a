"""What computes: one seam (base.py), one folder per kind of device."""
