def page(): return ""
