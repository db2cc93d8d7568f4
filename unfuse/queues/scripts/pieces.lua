-- What outputs have grown by: a list for each stage, by its task's name, and the set of all these names.
local GROWN = P .. ':grown'
local function pieces_key(name) return P .. ':pieces:' .. name end

local function count_pieces(name) return sound(call, 'LLEN', pieces_key(name)) or 0 end

local function drop_pieces(name)
  call('DEL', pieces_key(name))
  call('SREM', GROWN, name)
end

-- Looks through some of the names: an earlier version drops requests without their pieces.
local function drop_left_pieces()
  local scanned = call('SSCAN', GROWN, call('HGET', META, 'grown') or 0, 'COUNT', A.scan)
  call('HSET', META, 'grown', scanned[1])
  for _, name in ipairs(scanned[2]) do
    local length, from = string.match(name, '^(%d+):()')
    local id = string.sub(name, from, from + length - 1)
    if call('EXISTS', request_key(id)) == 0 then drop_pieces(name) end
  end
end

function verbs.append_all()
  local answers, counts = {}, {}
  for i, one in ipairs(A.grown) do
    local name = held(one.claim)
    counts[i] = name and count_pieces(name)
    if name and one.offset > counts[i] then
      return refuse('PROTOCOL pieces of %s of %s from number %d on, but only %d are recorded', one.claim.stage,
        one.claim.request, one.offset, counts[i])
    end
    answers[i] = name and 1 or 0
  end
  for i, one in ipairs(A.grown) do
    if counts[i] and one.offset + #one.pieces > counts[i] then
      local id, stage = one.claim.request, one.claim.stage
      if counts[i] == 0 then call('SADD', GROWN, name_of(id, stage)) end
      local count = call('RPUSH', pieces_key(name_of(id, stage)), unpack(one.pieces, counts[i] - one.offset + 1))
      publish(id, {type = 'appended', stage = stage, attempt = one.claim.attempt, step = count})
    end
  end
  return answers
end

function verbs.appended()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  return sound(call, 'LRANGE', pieces_key(name_of(A.id, A.stage)), A.after, A.after + A.limit - 1) or {}
end
