-- The functions of compiled views choose by the changes how their statements are planned. The next refresh of a view
-- makes its functions anew.

delete from gdq.compiled_view;
