"""Several engines behind one server: the processes of engines, router and front ends, and orders of administrators."""
